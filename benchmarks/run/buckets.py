"""Milliseconds of an allreduce step over links of 1 Gbit/s, with gradients reduced in buckets and in one piece."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.peers.horovod_world import run_gloo
from benchmarks.reports.report import Report, arguments
from benchmarks.run.allreduce import machines
from benchmarks.workloads.bucket_rank import PEERS
from benchmarks.workloads.models import SEED
from tests.support.machines import unavailable

RANKS = 2
RATE_MBIT = 1000.0


@dataclass(frozen=True)
class Work:
    """Extent of the measurements.

    Attributes:
        cases: Names of the models.
        batches: Rows of a rank's batch.
        steps: Steps of a run.
        runs: Runs of each peer, by turns.
    """

    cases: tuple[str, ...]
    batches: tuple[int, ...]
    steps: int
    runs: int


FULL = Work(("cnn", "10M"), (32, 128, 512), steps=8, runs=5)
QUICK = Work(("10M",), (32,), steps=3, runs=2)


def run(report: Report, work: Work) -> None:
    """Measure each model and batch in a world of its own, with a rank on each of two machines."""
    for case in work.cases:
        for batch in work.batches:
            program = [sys.executable, "-m", "benchmarks.workloads.bucket_rank", case, "--batch", str(batch)]
            with machines(RANKS, RATE_MBIT) as hosts:
                found = run_gloo(hosts, [*program, "--steps", str(work.steps), "--runs", str(work.runs)])
            for peer in PEERS:
                for seconds in found[peer]:
                    report.add(f"{case}, batches of {batch}", peer, "ms", 1000 * seconds)
            pairs = zip(*(found[peer] for peer in PEERS), strict=True)
            ratios = sorted(whole / parts for parts, whole in pairs)
            report.ratios[f"buckets/one reduction@{case}, {batch}"] = ratios[len(ratios) // 2]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("buckets", [SEED])
    if reason := unavailable():
        report.notes.append(f"not measured: {reason}")
    else:
        run(report, QUICK if options.quick else FULL)
    report.finish(options.json)


if __name__ == "__main__":
    main()
