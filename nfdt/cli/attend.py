"""Worker slots of this machine that serve a job server: started, watched, and ended when it is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from grpc_health.v1 import health_pb2, health_pb2_grpc
from nfdt_client.connection import Connection

from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.core.wire.channel import open_channel
from nfdt.launch.local import LocalLauncher, SlotOptions

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
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    watch.add_callback(gone.set)
    launcher = LocalLauncher(options)
    try:
        launcher.ensure("worker", slots)
        while not gone.wait(POLL_S):
            if launcher.failure:
                raise JobFailed(launcher.failure)
    finally:
        launcher.stop()
        channel.close()
