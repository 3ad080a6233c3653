"""Claims of the publications that NFDT follows: what docs/sources.md lacks is trained, and the page made anew."""

from __future__ import annotations

import argparse
import os
from functools import cache
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.reports import convergence_page
from benchmarks.reports.claims import plan_of_command
from benchmarks.reports.source_claims import commands
from benchmarks.reports.study_results import FOLDER, ResultFile
from benchmarks.run.convergence import Study
from benchmarks.workloads.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder with the data of all tasks")
    data_dir = parser.parse_args().data_dir
    read = cache(lambda task: TASKS[task].read(data_dir))
    for command in commands():
        plan = plan_of_command(command)
        results = ResultFile(FOLDER / f"{plan.task.replace('-', '_')}.jsonl")
        Study(plan, results, read(plan.task)).run()
    convergence_page.rewrite()


if __name__ == "__main__":
    main()
