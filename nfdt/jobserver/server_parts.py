"""Parts of a job server, created from its options: launchers, and the context of its jobs."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from nfdt.core.host.keras_backend import current_backend
from nfdt.core.host.machine import boot_id, process_lives
from nfdt.core.host.packages import require_page_packages
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.rights import AuditLog, Holders
from nfdt.core.jobs.runner import JobRunner
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.artifacts import default_cache
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.options import ServerOptions, shard_host
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.launch.fork_client import ForkServerClient
from nfdt.launch.fork_here import FORK_SERVER_LOG
from nfdt.launch.horovod import RingLauncher
from nfdt.launch.machine import find_gpus
from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotEnd, SlotOptions

if TYPE_CHECKING:
    from nfdt.web.server import PageServer

REAP_S = 2.0  # limit from the end of a slot's stream to that of its process


def make_launcher(options: ServerOptions, local: str, token: str) -> LocalLauncher | None:
    """Return the launcher of slots on this machine; None if the options start none."""
    if options.slot_command is not None and not options.slot_command:
        return None
    slots = SlotOptions(
        server=local,
        token=token,
        logs=options.state_dir / "logs",
        prefix="local-",
        host=shard_host(options),
        gpus=find_gpus(os.environ),
        backend=current_backend().name,
        kept_logs=default_cache().parent / "logs" if options.embedded else None,
    )
    if options.slot_command:
        slots = replace(slots, command=tuple(options.slot_command))
    return LocalLauncher(slots, fork_server=_adopt(options))


def _adopt(options: ServerOptions) -> ForkServerClient | None:
    """Return the client of the fork server that the options pass on, which has this process's environment."""
    if options.fork_server is None:
        return None
    requests = socket.socket(fileno=options.fork_server)
    requests.set_inheritable(False)
    return ForkServerClient(requests, os.environ, options.state_dir.parent / FORK_SERVER_LOG)


def make_rings(options: ServerOptions, local: str, token: str) -> RingLauncher | None:
    """Return the launcher of Horovod rings on this machine; None if the options start no slots."""
    if options.slot_command is not None and not options.slot_command:
        return None
    return RingLauncher(options.state_dir / "rings", local, token, keeps=options.embedded)


def make_context(
    options: ServerOptions, launcher: LocalLauncher | None, rings: RingLauncher | None, artifacts: ArtifactStore
) -> ServerContext:
    """Return the context of all jobs of the server."""

    def kill(hello: pb.SlotHello) -> None:
        if launcher is not None and hello.boot_id == boot_id() and hello.pid in launcher.pids:
            os.kill(hello.pid, signal.SIGKILL)

    def end_of(hello: pb.SlotHello) -> SlotEnd | None:
        return launcher.end_of(hello.name, REAP_S) if launcher is not None else None

    def lives(hello: pb.SlotHello) -> bool:
        here = hello.boot_id == boot_id() and hello.host == socket.gethostname()
        return not here or process_lives(hello.pid)

    return ServerContext(
        store=JobStore(options.state_dir / "jobs.sqlite"),
        artifacts=artifacts,
        pool=SlotPool(lives),
        launcher=launcher,
        launches_workers=launcher is not None and options.workers > 0,
        most_workers=None if options.embedded else options.workers,
        rings=rings,
        ranks_from_slots=not options.embedded,
        insecure_allreduce=options.insecure_allreduce,
        takes_hosts=options.embedded,
        keeps_checkpoints=not options.embedded,
        cancels_abandoned=options.embedded,
        attend_timeout_s=options.attend_timeout_s,
        shard_host=shard_host(options),
        tls=bool(options.tls_cert),
        insecure=options.insecure,
        kill=kill,
        end_of=end_of,
    )


def make_page(
    options: ServerOptions,
    store: JobStore,
    artifacts: ArtifactStore,
    runner: JobRunner,
    holders: Holders,
    audit: AuditLog,
) -> PageServer:
    """Return the page for browsers, which serves once it is started.

    Raises:
        NotInstalled: Its packages are missing.
        UsageError: Its address cannot be bound.
        Refused: Its address is not loopback, without TLS and without ``insecure``.
    """
    require_page_packages("--ui")
    from nfdt.web.server import PageAddress, PageServer, PageSource

    host = options.advertise or shard_host(options)
    address = PageAddress(str(options.ui), options.tls_cert, options.tls_key, options.insecure, host)
    return PageServer(address, PageSource(store, artifacts, runner, holders, audit))
