"""Channels and servers with the product's limits, keepalive, TLS and token on every call."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import Any

import grpc

from nfdt.core.errors import AuthenticationFailed, NfdtError, Refused, UsageError
from nfdt.core.wire.connection import Pem, client_tls, read_pem, server_tls
from nfdt.core.wire.doorkeeper import ConnectionLimits, Doorkeeper, GuardedServer, most_connections
from nfdt.core.wire.loop_server import LoopGate, LoopServer
from nfdt.core.wire.parsing import RequestParser
from nfdt.core.wire.status import abort
from nfdt.core.wire.token_channel import TokenChannel

LOOPBACK = "127.0.0.1"
CONTROL_BYTES = 64 * 2**20
MESSAGE_BYTES = CONTROL_BYTES // 4  # longer reports and answers travel in chunks
MAX_REPORT_BYTES = 2**31 - 1  # limit of protobuf
DATA_BYTES = 4 * 2**20
CHUNK_BYTES = 2 * 2**20
TOKEN_KEY = "authorization"
_SCHEME = "Bearer "
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_LOCAL_NAMES = frozenset({"localhost", "ip6-localhost"})

Authenticate = Callable[[str, str], bool]


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of ``host:port`` or ``[ipv6]:port``.

    Raises:
        UsageError: the port is missing or out of range.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"Address: expected HOST:PORT. Received: {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes on the same machine can reach this host name or address."""
    if host in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def same_token(expected: str, received: str) -> bool:
    """Compare two tokens in constant time; an empty token never matches."""
    return bool(expected) and hmac.compare_digest(expected.encode(), received.encode())


def token_of(metadata: Sequence[tuple[str, Any]] | None) -> str:
    """Return the bearer token in a call's metadata, or "" when there is none."""
    value = next((str(value) for key, value in metadata or () if key == TOKEN_KEY), "")
    return value.removeprefix(_SCHEME) if value.startswith(_SCHEME) else ""


def _options(max_message_bytes: int, quiet_s: float, unanswered_s: float) -> list[tuple[str, Any]]:
    """Return options of both sides; after ``quiet_s`` a ping is sent, which must be answered in ``unanswered_s``."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(quiet_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(unanswered_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(
    address: str,
    token: str,
    *,
    ca_file: Pem | None = None,
    cert_file: Pem | None = None,
    key_file: Pem | None = None,
    insecure: bool = False,
    max_message_bytes: int = CONTROL_BYTES,
) -> grpc.Channel:
    """Return a channel to ``address`` that sends ``token`` with every call; nothing is sent yet.

    Args:
        address: ``host:port``.
        token: Secret; only sent in the metadata of every call.
        ca_file: PEM certificates to trust, or their file. TLS is used when this is given, plain text otherwise.
        cert_file: PEM certificate of this client, for servers that require one (mutual TLS).
        key_file: PEM private key of this client.
        insecure: Allow a token in plain text to an address that is not loopback.
        max_message_bytes: Larger messages fail, in both directions.

    Raises:
        Refused: the token would be sent in plain text, without ``insecure``.
        UsageError: the address is malformed, or the files for TLS are unusable.
    """
    host, _ = split_address(address)
    if token and not (ca_file or insecure or is_loopback(host)):
        raise Refused(
            f"{address}: without TLS the token would be sent in plain text over the network. Name the certificates "
            "to trust (--ca-file, NFDT_CA_FILE), or insist with --insecure (NFDT_INSECURE=true)."
        )
    options = [
        *_options(max_message_bytes, 2.0, 6.0),  # a cut connection is opened again within seconds
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # limit of an attempt
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0 if is_loopback(host) else 1),
    ]
    if ca_file:
        client_tls(ca_file, cert_file, key_file)  # gRPC's own errors name no file
        credentials = grpc.ssl_channel_credentials(
            *(read_pem(pem) if pem else None for pem in (ca_file, key_file, cert_file))
        )
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address, options)
    return TokenChannel(channel, (TOKEN_KEY, _SCHEME + token))


def _refusal(authenticate: Authenticate, method: str, metadata: Any) -> NfdtError | None:
    """Return why a call is refused; None: it is accepted."""
    token = token_of(metadata)
    try:
        if method == _HEALTH_CHECK or authenticate(method, token):
            return None
    except NfdtError as error:
        return error
    return AuthenticationFailed(
        "The server does not accept this token. Use the one it was started with."
        if token
        else "No token came with the call. Expected: authorization metadata."
    )


class _TokenGate(grpc.ServerInterceptor):
    """Refuses calls without a valid token before their first message is read, and parses the requests of all others."""

    def __init__(self, authenticate: Authenticate, admit: Callable[[grpc.ServicerContext], None]) -> None:
        self._authenticate, self._admit = authenticate, admit
        self._parser = RequestParser()

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        refused = _refusal(self._authenticate, method, handler_call_details.invocation_metadata)
        if refused is not None:
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, refused))
        handler = continuation(handler_call_details)
        return handler and self._parser.wrapped(handler, method, None if method == _HEALTH_CHECK else self._admit)


def _refuse(refusal: NfdtError, _requests: Any, context: grpc.ServicerContext) -> Any:
    abort(context, refusal)


def _server_credentials(cert: Pem, key: Pem | None, client_ca: Pem | None) -> grpc.ServerCredentials:
    server_tls(cert, key, client_ca)  # gRPC's own errors name no file
    pair = (read_pem(key or b""), read_pem(cert))
    trusted = read_pem(client_ca) if client_ca else None
    return grpc.ssl_server_credentials([pair], trusted, require_client_auth=client_ca is not None)


def make_server(
    address: str,
    *,
    authenticate: Authenticate,
    cert: Pem | None = None,
    key: Pem | None = None,
    client_ca: Pem | None = None,
    insecure: bool = False,
    max_threads: int = 256,
    max_message_bytes: int = CONTROL_BYTES,
    limits: ConnectionLimits | None = None,
    most_calls: int | None = None,
) -> tuple[grpc.Server, str]:
    """Return a bound server, not started yet, that answers only calls with a valid token (and health checks).

    Args:
        address: ``host:port``; port 0 selects a free one.
        authenticate: Called with (method, token) before a call is read; compare with :func:`same_token`. An NfdtError
            that it raises is the answer.
        cert: PEM certificate chain; TLS is used when it is given.
        key: PEM private key of ``cert``.
        client_ca: PEM certificates; clients must present a certificate signed by one of them (mutual TLS).
        insecure: Allow a non-loopback address without TLS.
        max_threads: Calls that can be open at once; further ones are refused as RESOURCE_EXHAUSTED.
        max_message_bytes: Larger messages fail, in both directions.
        limits: Limits on connections. Default: as many as this process has descriptors for, few of them without token.
        most_calls: Number of calls that can be open at once on an event loop, where methods that are coroutine
            functions run; ``max_threads`` is then the number of calls of the others. None: each call has a thread.

    Returns:
        The server, and the address it is bound to.

    Raises:
        Refused: a non-loopback address without TLS and without ``insecure``.
        UsageError: the address cannot be bound, or the files for TLS are incomplete or unusable.
    """
    host, port = split_address(address)
    if (key or client_ca) and not cert:
        raise UsageError("TLS: expected a certificate (--tls-cert). Received: only --tls-key or --client-ca.")
    if not (cert or insecure or is_loopback(host)):
        raise Refused(
            f"Listening on {address} without TLS would send tokens and code in plain text over the network. "
            "Give a certificate and key (--tls-cert, --tls-key), listen on 127.0.0.1, or insist with --insecure."
        )
    limits = limits or ConnectionLimits.of(most_connections())
    doorkeeper = Doorkeeper(limits)
    options = [
        *_options(max_message_bytes, 30.0, 60.0),  # the job server counts heartbeats
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(limits.stranger_s * 1000)),
        ("grpc.max_allowed_incoming_connections", limits.total),
    ]
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # clients need not have it

    checks: Any
    served: Any
    if most_calls is None:
        pool = futures.ThreadPoolExecutor(max_threads, thread_name_prefix="rpc")
        gate = _TokenGate(authenticate, doorkeeper.admit)
        served = grpc.server(pool, interceptors=[gate], options=options, maximum_concurrent_rpcs=max_threads)
        checks = health.HealthServicer()
        checks.set("", health_pb2.HealthCheckResponse.SERVING)
    else:
        refusal = partial(_refusal, authenticate)
        loop_gate = LoopGate(refusal, doorkeeper.admit, lambda method: method == _HEALTH_CHECK, max_threads)
        served = LoopServer(loop_gate, options, most_calls)
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # it serves from the beginning
    server: Any = GuardedServer(served, doorkeeper)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    try:
        if cert:
            bound = server.add_secure_port(address, _server_credentials(cert, key, client_ca))
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UsageError(f"Cannot listen on {address}: {error}. Is the port in use? Port 0 takes a free one.") from None
    if port == 0 and bound == 0:
        raise UsageError(f"Cannot listen on {address}.")
    return server, join_address(host, bound)
