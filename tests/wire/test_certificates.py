"""Certificates of an authority that lives in memory, used by gRPC and by plain TLS connections."""

from __future__ import annotations

import socket
import ssl
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nfdt.core.wire.certificates import CertificateAuthority, CertificateKeyPair
from nfdt.core.wire.channel import make_server, open_channel
from nfdt.core.wire.connection import client_tls, server_tls

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority("test authority")


@pytest.fixture(scope="module")
def pair(authority: CertificateAuthority) -> CertificateKeyPair:
    return authority.issue(["localhost", "127.0.0.1"])


def check(address: str, ca: bytes) -> int:
    channel = open_channel(address, "token", ca_file=ca)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
    finally:
        channel.close()


def test_grpc_trusts_the_authority_of_a_server_and_no_other(
    authority: CertificateAuthority, pair: CertificateKeyPair
) -> None:
    server, address = make_server("127.0.0.1:0", authenticate=lambda *_: True, cert=pair.cert, key=pair.key)
    server.start()
    try:
        assert check(address, authority.cert) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            check(address, CertificateAuthority("test authority").cert)
    finally:
        server.stop(None)


def handshake(server: CertificateKeyPair, ca: bytes, host: str) -> bytes:
    here, there = socket.socketpair()
    context = server_tls(server.cert, server.key, None)

    def serve() -> None:
        try:
            with context.wrap_socket(here, server_side=True) as peer:
                peer.sendall(b"hello")
        except OSError:
            here.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        there.settimeout(TIMEOUT_S)
        with client_tls(ca, None, None).wrap_socket(there, server_hostname=host) as peer:
            return peer.recv(5)
    finally:
        there.close()
        thread.join(TIMEOUT_S)


def test_plain_tls_takes_pem_data(authority: CertificateAuthority, pair: CertificateKeyPair) -> None:
    assert handshake(pair, authority.cert, "127.0.0.1") == b"hello"
    assert handshake(pair, authority.cert, "localhost") == b"hello"


def test_a_certificate_is_valid_for_its_hosts_only(authority: CertificateAuthority, pair: CertificateKeyPair) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="10.1.2.3"):
        handshake(pair, authority.cert, "10.1.2.3")


def test_a_certificate_issues_no_others(authority: CertificateAuthority, pair: CertificateKeyPair) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(CertificateAuthority("other").issue(["localhost"]), pair.cert, "localhost")


def test_keys_are_not_shown(pair: CertificateKeyPair) -> None:
    assert "PRIVATE" not in repr(pair)
    assert pair.key.startswith(b"-----BEGIN PRIVATE KEY-----")
