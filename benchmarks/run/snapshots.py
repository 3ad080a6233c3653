"""Samples per second of one worker whose shard is copied to the disk every few seconds, against hardly ever."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.reports.report import Report, Row, arguments
from benchmarks.run.overhead import measure
from benchmarks.workloads.epochs import Measured, Work
from benchmarks.workloads.models import SEED

WORK = {"cnn": Work(40_960, 2, 3), "10M": Work(40_960, 2, 3)}
QUICK = {"cnn": Work(20_480, 2, 1), "10M": Work(10_240, 2, 1)}

HARDLY_EVER = 3600.0
INTERVALS_S = (HARDLY_EVER, 10.0, 1.0)


def run(report: Report, data_dir: Path | None, work: dict[str, Work]) -> None:
    """Measure every case with each interval in turn."""
    for case, chosen in work.items():
        found: dict[float, list[Measured]] = {interval_s: [] for interval_s in INTERVALS_S}
        for _ in range(chosen.runs):
            for interval_s in INTERVALS_S:
                found[interval_s].append(measure(case, chosen, data_dir, {"snapshot_s": interval_s}))
        for interval_s, runs in found.items():
            report.rows.append(Row(case, f"{interval_s:g} s", "samples/s", [m.samples_per_s for m in runs]))
            pairs = zip(runs, found[HARDLY_EVER], strict=True)
            ratio = statistics.median(one.samples_per_s / other.samples_per_s for one, other in pairs)
            if interval_s != HARDLY_EVER:
                report.ratios[f"{interval_s:g} s@{case}"] = ratio


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    report = Report("snapshots", [SEED])
    run(report, options.data_dir, QUICK if options.quick else WORK)
    report.finish(options.json)


if __name__ == "__main__":
    main()
