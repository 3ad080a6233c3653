"""``nfdt server`` and ``nfdt worker``: the processes of a cluster, and the slots that a machine offers."""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import grpc
from nfdt_client.connection import JobsClient
from nfdt_client.options import resolve

from nfdt.cli.options import FILE, LOG_LEVELS, insecure_rings_option, log_to_stderr, server_options
from nfdt.cli.process import end_in_order, end_on_sigterm
from nfdt.cli.table import count_of
from nfdt.core.errors import JobFailed, ServerUnreachable, UsageError
from nfdt.core.host.code_user import choose_code_user
from nfdt.core.host.keras_backend import TRAINING, current_backend
from nfdt.core.host.machine import find_gpus, share_gpus
from nfdt.core.host.packages import require_server_packages
from nfdt.core.host.private_files import ensure_folder
from nfdt.core.jobs.rights import Holder, ensure_token_file, of_worker
from nfdt.core.wire import workers_pb2, workers_pb2_grpc
from nfdt.core.wire.channel import open_channel, split_address
from nfdt.core.wire.status import translate
from nfdt.core.work.patience import Patience
from nfdt.core.work.slot_connection import GRACE_S, PATIENCE_S
from nfdt.jobserver.main import ServerOptions, serve
from nfdt.launch.machine import route_address
from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotOptions

if TYPE_CHECKING:
    from nfdt.core.jobs.service import Page

_log = logging.getLogger(__name__)

LAUNCHER_POLL_S = 0.5
REPORT_S = 5.0


def wait_for_server(options: SlotOptions, timeout_s: float) -> None:
    """Return once the server answers and accepts the token.

    Raises:
        ServerUnreachable: it did not answer within ``timeout_s`` seconds.
        AuthenticationFailed: it does not accept the token.
    """
    with closing(JobsClient(options.server, options.token, **options.tls, reconnect_s=timeout_s)) as connection:
        connection.persist(connection.describe)


def offer_slots(
    options: SlotOptions, slots: int, shards: int = 0, *, wait_s: float = 0.0, ending: threading.Event | None = None
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
            # While some slots live, a failed start is not the end: it is tried again.
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


LOG_DIR = Path("~/.cache/nfdt/logs")
STATE_DIR = Path("~/.nfdt")
DIRECTORY = click.Path(path_type=Path)


code_user_option = click.option(
    "--code-user",
    metavar="ACCOUNT",
    help="Run code of jobs with its rights. Default: those of this command; with root, a user for each session.",
)


@click.command()
@click.option("--listen", default="127.0.0.1:7777", show_default=True, metavar="HOST:PORT", help="Port 0: a free one.")
@click.option("--state-dir", type=DIRECTORY, default=STATE_DIR, show_default=True, help="Jobs, artifacts, logs.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Secrets to accept, one per line.")
@click.option(
    "--worker-token-file", type=click.Path(path_type=Path), help="Secret for `nfdt worker`, which may not train."
)
@click.option("--tls-cert", type=FILE, help="PEM certificate chain; turns TLS on.")
@click.option("--tls-key", type=FILE, help="Its PEM private key.")
@click.option("--client-ca", type=FILE, help="Ask clients for certificates signed by one of these.")
@click.option("--insecure", is_flag=True, help="Allow an address other than loopback without TLS.")
@insecure_rings_option
@click.option("--allow-code", is_flag=True, help="Take jobs that carry pickled code of their script.")
@code_user_option
@click.option("--workers", type=click.IntRange(0), default=0, show_default=True, help="Worker slots on this machine.")
@click.option("--ui", metavar="HOST:PORT", help="Serve a page for browsers and /metrics there.")
@click.option("--advertise", default="", metavar="HOST", help="Name under which workers reach this machine.")
@click.option("--log-level", type=LOG_LEVELS, default="info", show_default=True)
def server(
    state_dir: Path,
    token_file: Path | None,
    worker_token_file: Path | None,
    code_user: str | None,
    log_level: str,
    **options: Any,
) -> None:
    """Serve jobs until interrupted; prints `listening on HOST:PORT` once it answers.

    Token files that do not exist are made; by default they are `token` and `worker-token` in the state directory.
    """
    log_to_stderr(log_level)
    require_server_packages("nfdt server")
    end_on_sigterm()
    options["code_user"] = choose_code_user(code_user) if options["allow_code"] else ""
    state_dir = ensure_folder(state_dir.expanduser().absolute(), "--state-dir")
    token_file = token_file or state_dir / "token"
    worker_token_file = worker_token_file or state_dir / "worker-token"
    tokens = (*ensure_token_file(token_file), *map(of_worker, ensure_token_file(worker_token_file)))
    running = serve(ServerOptions(state_dir, tokens, **options))
    try:
        click.echo(f"token in {token_file}, for workers in {worker_token_file}", err=True)
        if running.page is not None:
            click.echo(f"page: {_link_for_terminal(running.page, tokens)}", err=True)
        click.echo(f"listening on {running.address}")
        running.wait()
    finally:
        running.stop()


def _link_for_terminal(page: Page, tokens: Sequence[str]) -> str:
    """Return a link with the most rights that a token of this server has; in a log the address only, without a key."""
    if not sys.stderr.isatty():
        return f"{page.url} (`nfdt ui` makes a link to it)"
    roles = ("work", "read", "train", "admin")
    return page.make_link(max(map(Holder.parse, tokens), key=lambda holder: roles.index(holder.role)))


@click.command()
@server_options
@click.option("--slots", type=click.IntRange(0), help="Workers to keep, on equally many GPUs; 1, or 0 with --shards.")
@click.option("--shards", type=click.IntRange(0), default=0, show_default=True, help="Shard processes to keep here.")
@click.option("--host", default="", metavar="ADDRESS", help="Of this machine for its shards; default: the route's.")
@click.option("--name", default=socket.gethostname(), show_default=True, help="Prefix of the slots' names.")
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=PATIENCE_S, show_default=True, metavar="SECONDS")
@click.option(
    *("--grace", "grace_s"),
    type=click.FloatRange(0),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Time for slots to hand over after SIGTERM.",
)
@click.option(
    "--backend", type=click.Choice(TRAINING), help="Of Keras in the workers; default: as Keras chooses it here."
)
@code_user_option
@click.option("--log-dir", type=DIRECTORY, default=LOG_DIR, show_default=True)
@click.option("--log-level", type=LOG_LEVELS, default="info", show_default=True)
def worker(
    slots: int | None,
    shards: int,
    host: str,
    name: str,
    wait_s: float,
    grace_s: float,
    backend: str | None,
    code_user: str | None,
    log_dir: Path,
    log_level: str,
    **connection: str | None,
) -> None:
    """Offer slots of this machine to a job server: --slots for workers, --shards for parts of the weights.

    Slots that end are started again. When the server does not answer, the slots wait for it (--wait), go on
    where they stopped when it is back, and end otherwise: the exit code is 4 then.

    After SIGTERM workers finish their step and shards are handed over (--grace); a second SIGTERM ends all at once.
    """
    log_to_stderr(log_level)
    require_server_packages("nfdt worker")
    end_on_sigterm()
    chosen = resolve(connection)
    if chosen.server is None:
        raise UsageError("worker: expected --server HOST:PORT, or NFDT_SERVER in the environment. Received: none.")
    slots = slots if slots is not None else 0 if shards else 1
    if not slots + shards:
        raise UsageError("worker: expected --slots or --shards of at least 1. Received: 0 of both.")
    options = SlotOptions(
        chosen.server,
        chosen.token(),
        ensure_folder(log_dir.expanduser(), "--log-dir"),
        prefix=f"{name}-",
        tls=chosen.tls,
        gpus=share_gpus(find_gpus(os.environ), slots),
        wait_s=wait_s,
        grace_s=grace_s,
        backend=backend or current_backend().name,
        code_user=choose_code_user(code_user),
    )
    wait_for_server(options, wait_s)
    options = replace(options, host=host or route_address(split_address(options.server)[0]))
    offered = count_of(slots, "slot") + (f" and {count_of(shards, 'shard')} at {options.host}" if shards else "")
    click.echo(f"offers {offered} to {chosen.server}", err=True)
    ending = end_in_order()
    offer_slots(options, slots, shards, wait_s=wait_s, ending=ending)
    if ending.is_set():  # by SIGTERM: the slots have handed over, as asked
        return
    raise ServerUnreachable(f"{chosen.server} has not answered for {wait_s:g} s. Start it, then this command again.")
