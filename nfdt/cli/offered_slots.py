"""Worker slots of this machine for a job server: start, supervision, and end when the server is gone."""

from __future__ import annotations

import logging
import queue
import threading

import grpc
from nfdt_client.connection import JobsClient

from nfdt.core.errors import JobFailed
from nfdt.core.wire import workers_pb2, workers_pb2_grpc
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.status import translate
from nfdt.core.work.patience import Patience
from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotOptions

_log = logging.getLogger(__name__)

LAUNCHER_POLL_S = 0.5
REPORT_S = 5.0


def wait_for_server(options: SlotOptions, timeout_s: float) -> None:
    """Return once the server answers and accepts the token.

    Raises:
        ServerUnreachable: it did not answer within ``timeout_s`` seconds.
        AuthenticationFailed: it does not accept the token.
    """
    connection = JobsClient(options.server, options.token, **options.tls, reconnect_s=timeout_s)
    try:
        connection.persist(connection.describe)
    finally:
        connection.close()


def offer_slots(
    options: SlotOptions,
    slots: int,
    shards: int = 0,
    *,
    wait_s: float = 0.0,
    ending: threading.Event | None = None,
) -> None:
    """Keep ``slots`` worker slots and ``shards`` shard slots registered until the server is gone for ``wait_s`` s.

    When ``ending`` is set, the slots end in order, within the grace of the options.

    Raises:
        JobFailed: slots end as fast as they start (the message names their logs), or none can be started.
    """
    ending, gone = ending or threading.Event(), threading.Event()
    channel = open_channel(options.server, options.token, **options.tls)
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    watcher = threading.Thread(target=_watch, args=(channel, options.server, wait_s, gone), name="health", daemon=True)
    reporter = threading.Thread(target=_report_ends, args=(channel, options.server, ended), name="ended", daemon=True)
    for thread in (watcher, reporter):
        thread.start()
    launcher = LocalLauncher(options, ended.put)
    try:
        launcher.ensure("worker", slots)
        launcher.ensure("shard", shards)
        while not gone.is_set():
            if ending.wait(LAUNCHER_POLL_S):  # at once: slots that have ended before it would be started again
                launcher.drain()
                return
            failure = launcher.failure
            if failure and (launcher.given_up.is_set() or not launcher.pids):
                raise JobFailed(failure)
    finally:
        gone.set()
        launcher.stop()
        ended.put(None)
        reporter.join(REPORT_S)
        channel.close()
        for thread in (watcher, reporter):  # their log lines come before the reason for the end
            thread.join(REPORT_S)


def _watch(channel: grpc.Channel, server: str, wait_s: float, gone: threading.Event) -> None:
    """Watch the server's health; the server is gone if the stream ends and cannot be reopened."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    patience = Patience(wait_s, gone)
    while True:
        try:
            for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                patience.success()
        except grpc.RpcError as error:
            if gone.is_set():  # this process ends, and has closed the channel
                return
            _log.info("the server's health stream ended: %s", translate(error, server))
        if not patience.failure():
            gone.set()
            return


def _report_ends(channel: grpc.Channel, server: str, ended: queue.SimpleQueue[str | None]) -> None:
    """Report ended slots to the server; an unreachable server detects the end later by itself."""
    stub = workers_pb2_grpc.WorkersStub(channel)
    for name in iter(ended.get, None):
        try:
            stub.Ended(workers_pb2.SlotEnded(name=name), timeout=REPORT_S)
        except grpc.RpcError as error:
            _log.info("the end of slot %s was not reported: %s", name, translate(error, server))
