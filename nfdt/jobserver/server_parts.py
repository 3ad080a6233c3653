"""Options of a job server, and the parts that they determine: launchers, the context of all jobs, the page."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nfdt.core.errors import UsageError
from nfdt.core.host.keras_backend import current_backend
from nfdt.core.host.machine import boot_id, find_gpus, is_own_address, process_lives, share_gpus
from nfdt.core.host.packages import require_page_packages
from nfdt.core.jobs.admission import Limits
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.rights import AuditLog, Holders
from nfdt.core.jobs.runner import JobRunner
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import split_address
from nfdt.core.wire.connection import read_pem
from nfdt.core.work.artifacts import default_cache
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.launch.fork_client import ForkServerClient
from nfdt.launch.fork_here import FORK_SERVER_LOG
from nfdt.launch.horovod import RingLauncher
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.machine import reachable_host
from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotOptions
from nfdt.schedulers.job_queue import Quota

if TYPE_CHECKING:
    from nfdt.web.server import PageServer


@dataclass(frozen=True)
class ServerOptions:
    """Options of a job server.

    Attributes:
        state_dir: Directory of database, artifacts and logs; created with mode 0700. One server at a time.
        tokens: Lines of a token file, for clients and slots; see :mod:`nfdt.core.jobs.rights`.
        listen: ``host:port``; port 0 takes a free one.
        tls_cert: PEM certificate chain; it enables TLS.
        tls_key: PEM private key.
        client_ca: PEM certificates; clients must present one signed by them.
        insecure: Whether a non-loopback address without TLS is allowed.
        insecure_allreduce: Whether ranks on several machines may exchange gradients in plain text.
        allow_code: Whether jobs with pickled code are accepted.
        code_user: Whose rights the code of jobs has, see :func:`nfdt.core.host.code_user.choose_code_user`.
        embedded: Whether it serves one script: without checkpoints, and jobs end with their client.
        workers: Number of worker slots to start on this machine; 0: all are external.
        shards: Number of shard slots to start at once; more are started when a job needs them.
        rings: Horovod rings to start at once, for the first job that requests rings of the same shape.
        advertise: Name or address of this machine at which workers reach its shards; "": the server finds one.
        limits: Limits for one client.
        attend_timeout_s: Seconds for which an interactive job's client may be gone.
        slot_command: Command that starts a slot; None: the default one; empty: no slots are started.
        ui: ``host:port`` of the page for browsers; port 0 takes a free one. None: there is no page.
        fork_server: Descriptor of a socket to a fork server, which makes the slots; None: the server starts one.
    """

    state_dir: Path
    tokens: Sequence[str] = field(repr=False)
    listen: str = "127.0.0.1:0"
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    insecure: bool = False
    insecure_allreduce: bool = False
    allow_code: bool = False
    code_user: str = ""
    embedded: bool = False
    workers: int = 0
    shards: int = 1
    rings: Sequence[RingShape] = ()
    advertise: str = ""
    limits: Limits = Limits()
    attend_timeout_s: float = 60.0
    slot_command: Sequence[str] | None = None
    ui: str | None = None
    fork_server: int | None = None


def shard_host(options: ServerOptions) -> str:
    """Return the address on which this machine's shards listen, as it is sent to workers.

    Raises:
        UsageError: The name to advertise is not one of this machine.
    """
    if options.advertise and not is_own_address(options.advertise):
        raise UsageError(
            "--advertise: expected a name or address of this machine, on which its shards can listen. Received: "
            f"{options.advertise}. Name one that this machine and all workers resolve to an address of it."
        )
    return options.advertise or reachable_host(split_address(options.listen)[0], certified_hosts(options))


def certified_hosts(options: ServerOptions) -> tuple[str, ...]:
    """Return the names and addresses in the server's certificate; none without TLS."""
    if not options.tls_cert:
        return ()
    from nfdt.core.wire.certificates import hosts_of  # takes 0.1 s to import

    return hosts_of(read_pem(options.tls_cert))


def certificate_warning(options: ServerOptions, host: str) -> str | None:
    """Return what is wrong with the server's certificate for clients that connect to ``host``, or None."""
    certified = certified_hosts(options)
    if not options.tls_cert or host in certified:
        return None
    valid = ", ".join(certified) or "no host at all"
    return (
        f"the certificate {options.tls_cert} is valid for {valid}, not for {host}: clients and workers must name the "
        "server in --server as the certificate does. `nfdt certs` makes one for several hosts."
    )


def make_launchers(
    options: ServerOptions, local: str, token: str
) -> tuple[LocalLauncher, RingLauncher] | tuple[None, None]:
    """Return the launchers of slots and of Horovod rings on this machine; None if the options start no slots."""
    if options.slot_command is not None and not options.slot_command:
        return None, None
    slots = SlotOptions(
        server=local,
        token=token,
        logs=options.state_dir / "logs",
        prefix="local-",
        host=options.advertise,
        gpus=share_gpus(find_gpus(os.environ), options.workers),
        backend=current_backend().name,
        kept_logs=default_cache().parent / "logs" if options.embedded else None,
        code_user=options.code_user,
    )
    if options.slot_command:
        slots = replace(slots, command=tuple(options.slot_command))
    rings = RingLauncher(options.state_dir / "rings", local, token, keeps=options.embedded)
    return LocalLauncher(slots, fork_server=_adopt(options)), rings


def _adopt(options: ServerOptions) -> ForkServerClient | None:
    """Return the client of the fork server that the options pass on, which has this process's environment."""
    if options.fork_server is None:
        return None
    requests = socket.socket(fileno=options.fork_server)
    requests.set_inheritable(False)
    return ForkServerClient(requests, os.environ, options.state_dir.parent / FORK_SERVER_LOG)


def make_context(
    options: ServerOptions,
    launcher: LocalLauncher | None,
    rings: RingLauncher | None,
    artifacts: ArtifactStore,
    holders: Holders,
) -> ServerContext:
    """Return the context of all jobs of the server."""

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
        insecure_allreduce=options.insecure_allreduce,
        embedded=options.embedded,
        attend_timeout_s=options.attend_timeout_s,
        shard_host=options.advertise,
        tls=bool(options.tls_cert),
        insecure=options.insecure,
        quotas={owner: Quota(**limits) for owner, limits in holders.quotas().items()},
    )


def make_page(
    options: ServerOptions,
    store: JobStore,
    artifacts: ArtifactStore,
    runner: JobRunner,
    holders: Holders,
    audit: AuditLog,
    most: int,
) -> PageServer:
    """Return the page for browsers, which serves at most ``most`` connections at a time once it is started.

    Raises:
        NotInstalled: Its packages are missing.
        UsageError: Its address cannot be bound.
        Refused: Its address is not loopback, without TLS and without ``insecure``.
    """
    require_page_packages("--ui")
    from nfdt.web.pages import PageSource
    from nfdt.web.server import PageAddress, PageServer

    tls = options.tls_cert, options.tls_key
    address = PageAddress(str(options.ui), *tls, options.insecure, options.advertise, most)
    return PageServer(address, PageSource(store, artifacts, runner, holders, audit))
