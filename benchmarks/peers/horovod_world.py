"""Worlds of Horovod ranks that time allreduces: by environment with Horovod's own store, or by ``mpirun``."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from benchmarks.peers.processes import ROOT, PeerFailed, environment
from benchmarks.workloads.ring_rank import PORT, RESULT
from nfdt.launch.horovod import host_info
from nfdt.launch.horovod_command import RingShape, ring_command

LIMIT_S = 900.0
Seconds = dict[int, list[float]]
"""Seconds of every timed allreduce, by its bytes."""


@dataclass(frozen=True)
class Host:
    """Machine of some ranks.

    Attributes:
        name: Name of the machine.
        address: Address at which its ranks are reached.
        interface: Network interface of that address.
        ranks: Number of its ranks.
        enter: Command that runs its arguments on the machine; empty: on this one.
    """

    name: str
    address: str
    interface: str
    ranks: int
    enter: tuple[str, ...] = ()


def this_machine(ranks: int) -> list[Host]:
    """Return this machine with a number of ranks."""
    return [Host("localhost", "127.0.0.1", "lo", ranks)]


def time_gloo(hosts: Sequence[Host], sizes: Sequence[int], repeats: int) -> Seconds:
    """Return the seconds of allreduces in a gloo world on these hosts; their ranks follow each other.

    Raises:
        PeerFailed: a rank failed or exceeded the limit.
    """
    return _seconds(run_gloo(hosts, _program(sizes, repeats)))


def run_gloo(hosts: Sequence[Host], program: Sequence[str]) -> dict[str, Any]:
    """Run a program on all ranks of a gloo world on these hosts; return the JSON object that rank 0 prints.

    Raises:
        PeerFailed: a rank failed or exceeded the limit.
    """
    places = _places(hosts)
    with contextlib.ExitStack() as ending, tempfile.TemporaryFile("w+") as errors:
        plan = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
        first = _start([*places[0][0].enter, *program, "--store", plan], places[0][1], errors, ending)
        limit = threading.Timer(LIMIT_S, first.kill)
        limit.start()
        ending.callback(limit.cancel)
        port = _line(first, PORT, errors)
        store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0].address, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
        for host, variables in places[1:]:
            _start([*host.enter, *program], {**variables, **store}, errors, ending)
        return _object(_line(first, RESULT, errors))


def time_mpi(ranks: int, sizes: Sequence[int], repeats: int) -> Seconds:
    """Return the seconds of allreduces in a world that ``mpirun`` starts on this machine.

    Raises:
        PeerFailed: a rank failed or exceeded the limit.
    """
    command = ring_command(RingShape(ranks, "mpirun"), _program(sizes, repeats), host_info())
    done = subprocess.run(command, cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=LIMIT_S)
    lines = [line.partition(RESULT)[2] for line in done.stdout.splitlines() if RESULT in line]
    if done.returncode or not lines:
        raise PeerFailed(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return _seconds(_object(lines[0]))


def _program(sizes: Sequence[int], repeats: int) -> list[str]:
    measured = ["--bytes", *map(str, sizes), "--repeats", str(repeats)]
    return [sys.executable, "-m", "benchmarks.workloads.ring_rank", *measured]


def _places(hosts: Sequence[Host]) -> list[tuple[Host, dict[str, str]]]:
    """Return the host of each rank and the variables from which Horovod takes its place."""
    size = sum(host.ranks for host in hosts)
    found: list[tuple[Host, dict[str, str]]] = []
    for host in hosts:
        for local in range(host.ranks):
            across = [other for other in hosts if other.ranks > local]
            place = {
                "RANK": len(found),
                "SIZE": size,
                "LOCAL_RANK": local,
                "LOCAL_SIZE": host.ranks,
                "CROSS_RANK": across.index(host),
                "CROSS_SIZE": len(across),
                "HOSTNAME": host.name,
                "CONTROLLER": "gloo",
                "CPU_OPERATIONS": "gloo",
                "GLOO_IFACE": host.interface,
                "GLOO_RENDEZVOUS_ADDR": host.address,
            }
            found.append((host, {f"HOROVOD_{name}": str(value) for name, value in place.items()}))
    return found


def _start(
    command: Sequence[str], variables: Mapping[str, str], errors: IO[str], ending: contextlib.ExitStack
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    ending.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for an orderly end, which ranks reach together, then kill."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _line(process: subprocess.Popen[str], start: str, errors: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    errors.seek(0)
    raise PeerFailed(f"rank 0 ended before it printed {start!r}:\n{errors.read()[-2000:]}")


def _object(text: str) -> dict[str, Any]:
    found, _ = json.JSONDecoder().raw_decode(text)  # mpirun may join lines
    return dict(found)


def _seconds(found: Mapping[str, list[float]]) -> Seconds:
    return {int(size): seconds for size, seconds in found.items()}
