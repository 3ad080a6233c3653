"""``nfdt mpi``: one allocation of mpirun or srun, in which rank 0 is the server and the other ranks are workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from nfdt_client.embedded import EmbeddedServer
from nfdt_client.options import resolve

from nfdt.cli.options import (
    FILE,
    ScriptCommand,
    insecure_rings_option,
    log_to_stderr,
    script_argument,
    training_options,
)
from nfdt.cli.process import end_as_killed
from nfdt.cli.run import train_script
from nfdt.cli.script import Script
from nfdt.cli.serve import LOG_DIR, offer_slots, wait_for_server
from nfdt.core.errors import UsageError
from nfdt.core.host.launcher_rank import LauncherRank, find_launcher_rank
from nfdt.core.host.machine import find_gpus
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.core.wire.channel import join_address, split_address
from nfdt.launch.machine import certificate_hosts, public_host, route_address
from nfdt.launch.one_time_tls import authority_file, one_time_tls
from nfdt.launch.rendezvous import RendezvousInfo, await_rendezvous, publish_rendezvous, rendezvous_file
from nfdt.launch.slot_process import SlotOptions

START_S = 60.0
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")


def on_one_host(rank: LauncherRank, environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine, according to the launcher's environment."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return True
    return any(environment.get(name) == str(rank.size) for name in _LOCAL_SIZES)


@contextmanager
def _listening(
    host: str | None, tls_cert: str | None, tls_key: str | None, insecure: bool
) -> Iterator[tuple[list[str], str]]:
    """Yield the arguments of a server for other machines, and the PEM certificates that its peers trust.

    Unless the options name a certificate, an authority that exists for this launch alone issues one.
    """
    host = host or public_host()
    listen = ["--listen", join_address(host, 0)]
    if tls_cert:
        authority = Path(tls_cert).read_text(encoding="ascii")
        yield [*listen, "--tls-cert", tls_cert, "--tls-key", tls_key or ""], authority
    elif insecure:
        yield [*listen, "--insecure"], ""
    else:
        with one_time_tls(certificate_hosts(host)) as tls:
            yield [*listen, "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)], tls.authority.decode()


@click.command(cls=ScriptCommand)
@training_options(DEFAULT_PRESET)
@click.option("--host", metavar="HOST", help="Name or address of rank 0's machine for the others; else it is detected.")
@click.option("--tls-cert", type=FILE, help="Certificate of rank 0's machine; else a one-time authority issues one.")
@click.option("--tls-key", type=FILE, help="Its private key.")
@click.option("--insecure", is_flag=True, help="Use plain text between machines.")
@insecure_rings_option
@script_argument()
def mpi(
    script: Script,
    settings: dict[str, str],
    log_level: str,
    algorithm: str | None,
    insecure_allreduce: bool,
    **network: Any,
) -> None:
    """Run SCRIPT, or with -m a module, under mpirun or srun: rank 0 serves and runs it, every other rank is a worker.

    For example: mpirun -np 9 nfdt mpi train.py
    """
    log_to_stderr(log_level)
    launcher_rank = find_launcher_rank(os.environ)
    if launcher_rank is None:
        raise UsageError("nfdt mpi: started by no launcher. Expected: mpirun -np 3 nfdt mpi SCRIPT, or srun likewise.")
    if launcher_rank.size < 2:
        raise UsageError("nfdt mpi: rank 0 serves, the others work. Expected: 2 ranks or more. Received: 1.")
    if launcher_rank.rank:
        with _sigterm_ignored():
            _run_worker(launcher_rank, insecure=bool(network["insecure"]))
    else:
        end_as_killed()
        given = {"algorithm": algorithm, **settings}
        with _serving(launcher_rank, network, insecure_allreduce=insecure_allreduce) as connection:
            from nfdt_client.decorator import session

            options = rank_options({**given, **connection}, launcher_rank.size - 1)
            train_script(script, session(options=options))


def rank_options(given: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return the options of the script's session: the ranks of this launch are also those of rings and groups.

    Args:
        given: Options, with those of the connection to rank 0's server.
        workers: Number of ranks that work.

    Raises:
        UsageError: The options name another launcher for rings, or more workers than there are.
    """
    options = {"workers": workers, **given}
    chosen = resolve(options)
    if chosen.algorithm.topology_facts.flat:
        return options
    if chosen.cluster.launcher not in ("auto", "slots"):
        raise UsageError(
            f"nfdt mpi: launcher: expected none, because the ranks of this launch form the rings of "
            f"{chosen.algorithm.name!r}. Received: {chosen.cluster.launcher!r}. Leave launcher out."
        )
    if chosen.cluster.workers > workers:
        raise UsageError(
            f"nfdt mpi: expected at most {workers} workers, the ranks of this launch without rank 0. Received: "
            f"workers={chosen.cluster.workers}. Leave workers out, or start {chosen.cluster.workers + 1} ranks."
        )
    return {**options, "launcher": "slots"}


@contextmanager
def _serving(rank: LauncherRank, network: Mapping[str, Any], *, insecure_allreduce: bool) -> Iterator[dict[str, Any]]:
    """Run a job server in a separate process and publish its address to the other ranks; for rank 0.

    Args:
        rank: This rank.
        network: Options for connections from other machines; unused when all ranks are on this one.
        insecure_allreduce: Whether ranks on several machines may exchange gradients in plain text.

    Yields:
        Options of a session that uses the server.
    """
    with ExitStack() as stack:
        if on_one_host(rank, os.environ):
            arguments, authority = ["--listen", "127.0.0.1:0"], ""
        else:
            arguments, authority = stack.enter_context(_listening(**network))
        rings = ["--insecure-allreduce"] if insecure_allreduce else []
        server = EmbeddedServer(0, 1, network=[*arguments, *rings])
        stack.callback(server.stop)
        with _sigterm_ignored():
            server.start()
        rendezvous = RendezvousInfo(server.address(), server.worker_token, authority)
        stack.enter_context(publish_rendezvous(rendezvous_file(rank, os.environ), rendezvous))
        ca_file = stack.enter_context(_trusted(rendezvous))
        connection = {"server": rendezvous.address, "token": server.token, "ca_file": ca_file and str(ca_file)}
        yield {**connection, "insecure": network["insecure"]}


def _trusted(rendezvous: RendezvousInfo) -> AbstractContextManager[Path | None]:
    """Provide the file of the certificates to trust, which exists until the block ends; None without TLS."""
    return authority_file(rendezvous.authority) if rendezvous.authority else nullcontext()


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM in this process until the block ends, and in the processes it starts until they end.

    A scheduler sends SIGTERM to all processes of all ranks. The job goes on meanwhile, until rank 0 has saved its state
    and ends the server; then all other processes end too.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_worker(rank: LauncherRank, *, insecure: bool) -> None:
    """Run one worker slot for rank 0's server until the server is gone; ``insecure`` allows one without TLS."""
    rendezvous = await_rendezvous(rendezvous_file(rank, os.environ))
    gpus = find_gpus(os.environ)
    with _trusted(rendezvous) as ca_file:
        options = SlotOptions(
            rendezvous.address,
            rendezvous.token,
            LOG_DIR.expanduser(),
            prefix=f"rank-{rank.rank}-",
            host=route_address(split_address(rendezvous.address)[0]),
            tls={"ca_file": str(ca_file)} if ca_file else {"insecure": True} if insecure else {},
            gpus=gpus[rank.local_rank % len(gpus) :][:1] if gpus else (),
        )
        wait_for_server(options, START_S)
        offer_slots(options, 1)
