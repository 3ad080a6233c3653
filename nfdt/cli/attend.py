"""Worker slots of this machine that serve a job server: started, watched, and ended when it is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nfdt_client.connection import Connection

from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.core.wire.channel import open_channel
from nfdt.launch.local import LocalLauncher, SlotOptions

_log = logging.getLogger(__name__)

POLL_S = 0.5
RETRY_S = 0.5


def wait_for_server(options: SlotOptions, timeout_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return once the server answers and accepts the token.

    Raises:
        ServerUnreachable: it did not answer within ``timeout_s`` seconds.
        AuthenticationFailed: it does not accept the token.
    """
    deadline = time.monotonic() + timeout_s
    connection = Connection(options.server, options.token, ca_file=options.ca_file)
    try:
        while True:
            try:
                connection.describe()
                return
            except ServerUnreachable:
                if time.monotonic() >= deadline:
                    raise
                sleep(RETRY_S)
    finally:
        connection.close()


def attend(options: SlotOptions, slots: int) -> None:
    """Keep ``slots`` worker slots attending until the server is gone.

    Raises:
        JobFailed: slots end as fast as they are started; the message says where their logs are.
    """
    gone = threading.Event()
    channel = open_channel(options.server, options.token, ca_file=options.ca_file)
    threading.Thread(target=_watch, args=(channel, gone), name="health", daemon=True).start()
    launcher = LocalLauncher(options)
    try:
        launcher.ensure("worker", slots)
        while not gone.wait(POLL_S):
            if launcher.failure:
                raise JobFailed(launcher.failure)
    finally:
        launcher.stop()
        channel.close()


def _watch(channel: grpc.Channel, gone: threading.Event) -> None:
    """Read the server's health until the stream ends, which is when the server is gone."""
    try:
        for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            pass
    except grpc.RpcError as error:
        _log.info("the server's health stream ended: %s", error)
    gone.set()
