"""The job server process: stores, services, scheduler and launcher. No Keras, no pickles."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.host.child_process import Parent
from nfdt.core.host.local_servers import LocalServer, described, servers_folder
from nfdt.core.host.logs import log_to_stderr
from nfdt.core.host.machine import use_one_arena, versions
from nfdt.core.host.private_files import ensure_folder
from nfdt.core.host.signals import wait_in_main_thread
from nfdt.core.host.startup import note_start
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.rights import AuditLog, Holder, Holders, ensure_token_file, of_worker
from nfdt.core.jobs.service import JobsService
from nfdt.core.wire import jobs_pb2_grpc, workers_pb2_grpc
from nfdt.core.wire.channel import is_loopback, join_address, make_server, split_address
from nfdt.core.wire.doorkeeper import ConnectionLimits, most_connections, raise_descriptor_limit
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.scheduler import Scheduler
from nfdt.jobserver.server_parts import (
    ServerOptions,
    certificate_warning,
    make_context,
    make_launchers,
    make_page,
    shard_host,
)
from nfdt.jobserver.workers_service import WorkersService
from nfdt.launch.horovod_command import RingShape

if TYPE_CHECKING:
    from nfdt.web.server import PageServer

_log = logging.getLogger(__name__)

GRACE_S = 2.0
PARENT_POLL_S = 1.0  # interval of checks of the parent process
MAX_THREADS = 4096  # of calls that are no coroutines
MAX_CALLS = 2**16
PAGE_CONNECTIONS = 512
COLLECT = 20_000, 20, 50  # thresholds of the garbage collector: each full collection visits all slots


@dataclass
class RunningServer:
    """Server that serves; created by :func:`serve`.

    Attributes:
        address: Address for clients and slots.
        local: Plain-text address on loopback, for slots of this machine.
        context: Stores and slots of the server.
        scheduler: Its jobs.
        page: Page for browsers; None: there is none.
    """

    address: str
    local: str
    context: ServerContext
    scheduler: Scheduler
    page: PageServer | None
    _ending: contextlib.ExitStack
    _stopping: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Stop jobs, slots and streams, and close files. Safe to call twice and from any thread."""
        with self._stopping:
            self._ending.close()
            self._stopped.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait in the main thread until the server has stopped; return False if ``timeout_s`` passes first."""
        if timeout_s is None:
            wait_in_main_thread(self._stopped)
        return self._stopped.wait(timeout_s)


def _occupy(state_dir: Path) -> int:
    """Lock the state directory; return the descriptor that holds the lock."""
    ensure_folder(state_dir, "--state-dir")
    try:
        lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(
            f"--state-dir: expected to write its file `lock`. Received: {error}. Change its permissions, or choose "
            "another directory."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UsageError(
            f"State directory {state_dir} is in use by another server. Stop it or choose another."
        ) from None
    return lock


def _bind(options: ServerOptions, holders: Holders, most: int) -> tuple[grpc.Server, str, str]:
    """Create a server of at most ``most`` connections.

    Returns:
        The server, its address, and a plain-text loopback address for this machine's own slots.
    """

    def authenticate(method: str, token: str) -> bool:
        holder = holders.find(token)
        if holder is not None:
            holder.check_call(method)
        return holder is not None

    server, address = make_server(
        options.listen,
        authenticate=authenticate,
        cert=options.tls_cert,
        key=options.tls_key,
        client_ca=options.client_ca,
        insecure=options.insecure,
        max_threads=MAX_THREADS,
        limits=ConnectionLimits.of(most),
        most_calls=MAX_CALLS,
    )
    host, _ = split_address(address)
    if is_loopback(host) and not options.tls_cert:
        return server, address, address
    return server, address, join_address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))


def serve(options: ServerOptions) -> RunningServer:
    """Start a job server in this process; it accepts calls when this function returns.

    Raises:
        UsageError: There is no token, the address cannot be bound, or the state directory is in use.
        Refused: The address is not loopback, without TLS and without ``insecure``.
    """
    slot_token = secrets.token_hex(32)
    holders = Holders(options.tokens, Holder(slot_token, "own slots", "work"))
    raise_descriptor_limit()
    use_one_arena()
    most = most_connections()
    of_page = min(PAGE_CONNECTIONS, most // 4) if options.ui else 0
    server, address, local = _bind(options, holders, most - of_page)
    options = replace(options, advertise=shard_host(options))
    lock = _occupy(options.state_dir)
    audit = AuditLog(options.state_dir / "audit.log")

    def in_use() -> set[str]:
        return scheduler.artifacts_in_use()

    artifacts = ArtifactStore(
        options.state_dir / "artifacts",
        quota_bytes=options.limits.state_dir_bytes,
        max_artifact_bytes=options.limits.artifact_bytes,
        in_use=in_use,
        lasting=not options.embedded,
    )
    launcher, rings = make_launchers(options, local, slot_token)
    context = make_context(options, launcher, rings, artifacts, holders)
    scheduler = Scheduler(context)
    page = make_page(options, context.store, artifacts, scheduler, holders, audit, of_page) if options.ui else None
    jobs = JobsService(
        context.store,
        artifacts,
        scheduler,
        holders=holders,
        audit=audit,
        versions=versions(),
        allow_code=options.allow_code or options.embedded,
        limits=options.limits,
        shared_dir=str(options.state_dir) if is_loopback(split_address(address)[0]) else "",
        page=page,
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)
    workers_pb2_grpc.add_WorkersServicer_to_server(WorkersService(context, scheduler), server)
    scheduler.requeue_unfinished()
    server.start()
    if launcher is not None and rings is not None:
        launcher.ensure("shard", options.shards)
        launcher.ensure("worker", options.workers)
        for shape in options.rings:
            if not shape.in_slots:
                rings.prepare(shape)
    scheduler.start()
    if page is not None:
        page.start()
        _log.info("page at %s", page.url)
    _log.info("job server at %s, state in %s", address, options.state_dir)
    if not is_loopback(options.advertise):
        _log.info("workers are sent to %s for shards of this machine (--advertise)", options.advertise)
        if warning := certificate_warning(options, options.advertise):
            _log.warning("%s", warning)
    ending = contextlib.ExitStack()  # the last callback is called first
    ending.callback(os.close, lock)
    ending.callback(audit.close)
    ending.callback(context.store.close)
    ending.callback(lambda: server.stop(GRACE_S).wait())
    if page is not None:
        ending.callback(page.stop)
    ending.callback(context.store.wake)  # calls that wait for events end before the grace is over
    for part in (rings, launcher):
        if part is not None:
            ending.callback(part.stop)
    ending.callback(context.pool.dismiss_all)
    ending.callback(scheduler.stop)
    return RunningServer(address, local, context, scheduler, page, ending)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nfdt.jobserver.main", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, help="default: STATE_DIR/token, made when it is not there")
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-key")
    parser.add_argument("--client-ca")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--insecure-allreduce", action="store_true")
    parser.add_argument("--allow-code", action="store_true")
    parser.add_argument("--embedded", action="store_true", help="tokens from standard input, end when it closes")
    parser.add_argument("--folder", type=Path, help="of an embedded server: removed at the end, with all that is in it")
    parser.add_argument(
        "--no-slots", dest="slot_command", action="store_const", const=(), help="start neither workers nor shards"
    )
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument(
        "--ring", dest="rings", action="append", default=[], type=_ring, help="JSON of a Horovod ring to start at once"
    )
    parser.add_argument("--fork-server", type=int, metavar="FD", help="socket to a fork server that makes the slots")
    parser.add_argument("--ui", metavar="HOST:PORT", help="serve the page for browsers there")
    parser.add_argument("--advertise", default="")
    parser.add_argument("--attend-timeout", dest="attend_timeout_s", type=float, default=60.0)
    parser.add_argument("--log-level", default="info")
    return parser.parse_args(argv)


def _ring(text: str) -> RingShape:
    return RingShape.from_json(json.loads(text))


def _read_token(arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.embedded:
        words = sys.stdin.readline().split()
        return (*words[:1], *map(of_worker, words[1:]))
    ensure_folder(arguments.state_dir, "--state-dir")
    return ensure_token_file(arguments.token_file or arguments.state_dir / "token")


def _run(server: RunningServer, arguments: argparse.Namespace, parent: Parent, token: str) -> None:
    """Serve until stopped; an embedded server removes its files.

    A live parent may need the log and removes the remaining files itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN and arguments.embedded:
            continue  # its script decides
        signal.signal(number, lambda *_: threading.Thread(target=server.stop).start())
    with contextlib.ExitStack() as ending:
        if arguments.folder is not None:
            ending.callback(_remove_files, arguments, parent)
        ending.callback(server.stop)
        if arguments.embedded:
            found = LocalServer(os.getpid(), server.local, token, str(arguments.state_dir))
            try:
                ending.enter_context(described(found, servers_folder()))
            except (UsageError, OSError) as error:
                _log.warning("`nfdt jobs` will not find this server by itself: %s", error)
        note_start("job server", "serves")
        print(json.dumps({"address": server.address}), flush=True)
        while not server.wait(0) and not (arguments.embedded and parent.is_gone):
            (parent if arguments.embedded else server).wait(PARENT_POLL_S)


def _remove_files(arguments: argparse.Namespace, parent: Parent) -> None:
    shutil.rmtree(arguments.state_dir, ignore_errors=True)
    if parent.is_gone:
        shutil.rmtree(arguments.folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m nfdt.jobserver.main``, which prints one JSON line with the address when it serves."""
    note_start("job server", "has imported")
    gc.set_threshold(*COLLECT)
    arguments, parent = _parse(argv), Parent()
    log_to_stderr(arguments.log_level)
    known = {f.name for f in fields(ServerOptions)}
    try:
        tokens = _read_token(arguments)
        server = serve(ServerOptions(tokens=tokens, **{k: v for k, v in vars(arguments).items() if k in known}))
    except NfdtError as error:
        _log.error("%s", error)
        return error.exit_code
    _run(server, arguments, parent, tokens[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
