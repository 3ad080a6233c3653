"""``nfdt mpi``: one allocation of mpirun or srun, in which rank 0 is the server and the other ranks are workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from nfdt_client.embedded import EmbeddedServer
from nfdt_client.options import resolve

from nfdt.cli.attend import attend, wait_for_server
from nfdt.cli.options import (
    FILE,
    ScriptCommand,
    log_to_stderr,
    parse_settings,
    script_argument,
    training_options,
)
from nfdt.cli.run import train_script
from nfdt.cli.script import Script
from nfdt.cli.serve import LOG_DIR, end_as_killed, end_on_sigterm
from nfdt.core.errors import UsageError
from nfdt.core.host.launcher_rank import LauncherRank, find_launcher_rank
from nfdt.launch.machine import find_gpus
from nfdt.launch.rendezvous import RendezvousInfo, await_rendezvous, publish_rendezvous, rendezvous_file
from nfdt.launch.slot_options import SlotOptions

START_S = 60.0
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")


def on_one_host(rank: LauncherRank, environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine, according to the launcher's environment."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return True
    return any(environment.get(name) == str(rank.size) for name in _LOCAL_SIZES)


@dataclass(frozen=True)
class Network:
    """Options for connections to rank 0 from other machines; unused when all ranks are on one machine."""

    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool = False

    def server_options(self, *, one_host: bool) -> list[str]:
        """Return the arguments of the server: loopback, or this machine's name with TLS or ``insecure``."""
        if one_host:
            return ["--listen", "127.0.0.1:0"]
        security = ["--tls-cert", self.tls_cert, "--tls-key", self.tls_key or ""] if self.tls_cert else []
        return ["--listen", f"{socket.gethostname()}:0", *security, *(["--insecure"] if self.insecure else [])]


@click.command(cls=ScriptCommand)
@training_options
@click.option("--tls-cert", type=FILE, help="For ranks on several machines: certificate of rank 0's machine.")
@click.option("--tls-key", type=FILE, help="Its private key.")
@click.option("--insecure", is_flag=True, help="Let ranks on several machines talk in plain text.")
@script_argument()
@click.pass_context
def mpi(
    context: click.Context,
    script: Script,
    settings: tuple[str, ...],
    log_level: str,
    algorithm: str | None,
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
        end_on_sigterm()
        work(launcher_rank)
    else:
        end_as_killed()
        options: dict[str, Any] = {
            "algorithm": algorithm,
            "workers": launcher_rank.size - 1,
            **parse_settings(settings),
        }
        _require_flat(options)
        with _serving(launcher_rank, Network(**network)) as rendezvous:
            connection = {
                "server": rendezvous.address,
                "token": rendezvous.token,
                "ca_file": rendezvous.ca_file or None,
            }
            from nfdt_client.decorator import session

            train_script(context, script, session(options={**options, **connection}))


def _require_flat(options: Mapping[str, Any]) -> None:
    """Raise UsageError for a job whose workers Horovod launches: the ranks of this launch would be idle."""
    chosen = resolve(options).algorithm
    if not chosen.topology_facts.flat:
        raise UsageError(
            f"nfdt mpi: expected an algorithm whose workers are the ranks of this launch. Received: {chosen.name!r}, "
            "whose ranks Horovod needs to launch. For allreduce: mpirun -np N python SCRIPT, with @hfdt.distribute in "
            "it. For group-sync: nfdt run --algorithm group-sync SCRIPT."
        )


@contextmanager
def _serving(rank: LauncherRank, network: Network) -> Iterator[RendezvousInfo]:
    """Run a job server in a separate process and publish its address to the other ranks; for rank 0."""
    one_host = on_one_host(rank, os.environ)
    server = EmbeddedServer(0, 1, network=network.server_options(one_host=one_host))
    try:
        server.start()
        ca_file = "" if one_host or not network.tls_cert else str(Path(network.tls_cert).resolve())
        rendezvous = RendezvousInfo(server.address(), server.token, ca_file)
        with publish_rendezvous(rendezvous_file(rank, os.environ), rendezvous):
            yield rendezvous
    finally:
        server.stop()


def work(rank: LauncherRank) -> None:
    """Run one worker slot for rank 0's server until the server is gone."""
    rendezvous = await_rendezvous(rendezvous_file(rank, os.environ), timeout_s=START_S)
    gpus = find_gpus(os.environ)
    options = SlotOptions(
        rendezvous.address,
        rendezvous.token,
        LOG_DIR.expanduser(),
        prefix=f"rank-{rank.rank}-",
        ca_file=rendezvous.ca_file or None,
        gpus=gpus[rank.local_rank % len(gpus) :][:1] if gpus else (),
    )
    wait_for_server(options, START_S)
    attend(options, 1)
