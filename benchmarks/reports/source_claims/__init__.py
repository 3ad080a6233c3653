"""The claims of the publications that NFDT follows, and how our figures judge them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.reports.claims import CommandResults, ReportFigures, is_trained
from benchmarks.reports.source_claims.dbs_sgd import DBS_SGD
from benchmarks.reports.source_claims.h_ps import H_PS
from benchmarks.reports.source_claims.patent import PATENT
from benchmarks.reports.source_claims.thesis import THESIS
from benchmarks.reports.study_results import Result

SCALING = (
    "convergence --workers 1,2,4,8,16 --speeds equal-200ms@100 --epochs 1"
    " --rows ddc-asgd,group-sync,allreduce,local-ddc"
)
REAL_SCALING = "hetero --scaling --json benchmarks/results/hetero.json"
CLAIMS = {"dbs-sgd": DBS_SGD, "thesis": THESIS, "patent": PATENT, "h-ps": H_PS}


def scaling(results: Sequence[Result]) -> str:
    """Return a table of speeds of simulated workers by their number, as multiples of one worker's own speed.

    Raises:
        NotMeasured: a training has no result.
    """
    trained = CommandResults(SCALING, results)
    return _by_workers(
        SCALING, trained.plan.workers, trained.plan.rows, lambda row, workers: trained.best(row, workers).of_limit
    )


def real_scaling() -> str:
    """Return the same table of real workers, from the report of the benchmark.

    Raises:
        NotMeasured: there is no report, or it lacks a row.
    """
    report = ReportFigures(REAL_SCALING)
    clusters = {int(name.split()[0]): name for name in report.cases("of the limit")}
    rows = report.peers("of the limit")
    return _by_workers(
        REAL_SCALING, [*clusters], rows, lambda row, workers: report.value(clusters[workers], row, "of the limit")
    )


def _by_workers(command: str, sizes: Sequence[int], rows: Sequence[str], share: Callable[[str, int], float]) -> str:
    lines = [f"| row | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for row in rows:
        shares = {workers: share(row, workers) for workers in sizes}
        cells = [f"{of_limit * workers:.2f} ({of_limit:.2f})" for workers, of_limit in shares.items()]
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "```bash", f"./scripts/bench {command}", "```"])


def commands() -> list[str]:
    """Return every command whose trainings on simulated clusters the tables are made from, once."""
    judged = [claim.command for claims in CLAIMS.values() for claim in claims]
    return list(dict.fromkeys([*filter(is_trained, judged), SCALING]))
