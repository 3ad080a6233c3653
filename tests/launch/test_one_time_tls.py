"""TLS of one launch: names of this machine, and a server that only its own authority vouches for."""

from __future__ import annotations

import socket
import stat

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nfdt.core.wire.certificates import CertificateAuthority
from nfdt.core.wire.channel import join_address, make_server, open_channel, split_address
from nfdt.launch import machine
from nfdt.launch.machine import certificate_hosts, public_host
from nfdt.launch.one_time_tls import authority_file, one_time_tls

TIMEOUT_S = 20


@pytest.fixture
def server():
    """Provide the port and the authority of a server on loopback with a certificate for this launch."""
    with one_time_tls(certificate_hosts("localhost")) as tls:
        files = [tls.cert, tls.key]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        server, address = make_server("127.0.0.1:0", authenticate=lambda *_: True, cert=tls.cert, key=tls.key)
        server.start()
        yield split_address(address)[1], tls.authority
        server.stop(None).wait()
    assert not any(path.exists() for path in files)


def check(address, ca):
    channel = open_channel(address, "token", ca_file=ca)
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    finally:
        channel.close()


def test_the_launch_trusts_its_server_by_name_and_address(server):
    port, authority = server
    for host in ("localhost", "127.0.0.1"):
        check(join_address(host, port), authority)
    with authority_file(authority.decode()) as path:
        check(join_address("localhost", port), str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@pytest.mark.parametrize("ca", [None, CertificateAuthority("another launch").cert], ids=["plain", "another"])
def test_others_cannot_connect(server, ca):
    with pytest.raises(grpc.RpcError):
        check(join_address("127.0.0.1", server[0]), ca)


def test_a_host_name_that_means_loopback_is_not_sent_to_others(monkeypatch):
    monkeypatch.setattr(machine, "own_addresses", lambda: ["10.1.2.3"])
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert public_host() == "10.1.2.3"
    monkeypatch.setattr(machine, "is_own_address", lambda host, loopback: not loopback)
    assert public_host() == "localhost"


def test_a_certificate_names_every_way_to_this_machine(monkeypatch):
    monkeypatch.setattr(machine, "own_addresses", lambda: ["10.1.2.3", "fd00::2"])
    hosts = certificate_hosts("head")
    assert hosts[0] == "head"
    assert {"10.1.2.3", "fd00::2", socket.gethostname(), "127.0.0.1"} <= set(hosts)


def test_addresses_that_only_this_machine_knows_are_left_out():
    assert not [a for a in machine.own_addresses() if a.startswith(("127.", "169.254.", "fe80")) or a == "::1"]
