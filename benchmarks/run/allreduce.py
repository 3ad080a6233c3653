"""Seconds of an allreduce by ranks, bytes and links, with gloo and MPI: the constants of the cost model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.peers.horovod_world import Host, Seconds, this_machine, time_gloo, time_mpi
from benchmarks.reports.report import Report, arguments
from nfdt.launch.horovod import host_info
from nfdt.schedulers.ring_network import RingLink
from tests.support.machines import Rig, unavailable

MB = 1_000_000
HERE = "one machine"
LINKS = {"1 Gbit/s": 1000.0, "200 Mbit/s": 200.0}
GLOO, MPI = "gloo", "MPI"


@dataclass(frozen=True)
class Work:
    """Extent of the measurements.

    Attributes:
        ranks: Numbers of ranks.
        sizes: Bytes of the allreduces.
        repeats: Allreduces of each size in a world.
        runs: Worlds of each kind, by turns.
        links: Rates of the links between machines in Mbit/s, by name.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    repeats: int
    runs: int
    links: dict[str, float]


FULL = Work((2, 3, 4), (MB, 10 * MB, 40 * MB), repeats=8, runs=2, links=LINKS)
QUICK = Work((2,), (MB, 4 * MB), repeats=5, runs=1, links={"1 Gbit/s": 1000.0})


@contextmanager
def machines(ranks: int, rate_mbit: float) -> Iterator[list[Host]]:
    """Make a machine for each rank, in network namespaces with links of this rate."""
    with Rig(ranks, rate_mbit=rate_mbit) as rig:
        yield [Host(m.name, m.address, "eth0", 1, tuple(m.command([]))) for m in rig]


def measure(report: Report, case: str, work: Work, hosts: Sequence[Host], *, mpi: bool) -> None:
    """Time one world of each peer; the fastest allreduce of a world counts, as other processes only add to it."""
    ranks = sum(host.ranks for host in hosts)
    worlds: dict[str, Seconds] = {GLOO: time_gloo(hosts, work.sizes, work.repeats)}
    if mpi:
        worlds[MPI] = time_mpi(ranks, work.sizes, work.repeats)
    for peer, found in worlds.items():
        for size, seconds in found.items():
            report.add(f"{case}, {ranks} ranks, {size / MB:g} MB", peer, "ms", 1000 * min(seconds))


def add_fit(report: Report, case: str, work: Work) -> None:
    """Add the constants of the link to the ratios, and how far the fit is from what was measured."""
    measured = []
    for ranks in work.ranks:
        for size in work.sizes:
            runs = report.runs(f"{case}, {ranks} ranks, {size / MB:g} MB", GLOO, "ms")
            measured.append((ranks, size, min(runs) / 1000))
    link = RingLink.fitted(measured)
    report.ratios[f"latency_ms@{case}"] = 1000 * link.latency_s
    report.ratios[f"ns_per_byte@{case}"] = 1e9 * link.s_per_byte
    errors = [abs(link.allreduce_s(ranks, size) / seconds - 1) for ranks, size, seconds in measured]
    report.ratios[f"median error of the fit@{case}"] = statistics.median(errors)


def compare(report: Report, work: Work) -> None:
    """Add the ratio of gloo's seconds to MPI's, by ranks and bytes."""
    for ranks in work.ranks:
        for size in work.sizes:
            case = f"{HERE}, {ranks} ranks, {size / MB:g} MB"
            ours, theirs = report.runs(case, GLOO, "ms"), report.runs(case, MPI, "ms")
            if theirs:
                report.ratios[f"gloo/MPI@{ranks} ranks, {size / MB:g} MB"] = min(ours) / min(theirs)


def run(report: Report, work: Work) -> None:
    """Measure on this machine, then between machines of a rig where one can be made."""
    for _ in range(work.runs):
        for ranks in work.ranks:
            measure(report, HERE, work, this_machine(ranks), mpi=host_info().mpirun is not None)
    add_fit(report, HERE, work)
    compare(report, work)
    if reason := unavailable():
        report.notes.append(f"between machines: not measured: {reason}")
        return
    for case, rate_mbit in work.links.items():
        for _ in range(work.runs):
            for ranks in work.ranks:
                with machines(ranks, rate_mbit) as hosts:
                    measure(report, case, work, hosts, mpi=False)
        add_fit(report, case, work)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("allreduce", [])
    run(report, QUICK if options.quick else FULL)
    report.finish(options.json)


if __name__ == "__main__":
    main()
