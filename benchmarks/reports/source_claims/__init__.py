"""The claims of the publications that NFDT follows, and how our figures judge them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reports.claims import CommandResults, is_trained
from benchmarks.reports.source_claims.dbs_sgd import DBS_SGD
from benchmarks.reports.source_claims.h_ps import H_PS
from benchmarks.reports.source_claims.patent import PATENT
from benchmarks.reports.source_claims.thesis import THESIS
from benchmarks.reports.study_results import Result

SCALING = (
    "convergence --workers 1,2,4,8,16 --speeds equal-200ms@100 --epochs 1"
    " --rows ddc-asgd,group-sync,allreduce,local-ddc --seeds 1"
)
CLAIMS = {"dbs-sgd": DBS_SGD, "thesis": THESIS, "patent": PATENT, "h-ps": H_PS}


def scaling(results: Sequence[Result]) -> str:
    """Return a table of speeds by the number of workers, as multiples of one worker's own speed."""
    trained = CommandResults(SCALING, results)
    sizes = trained.plan.workers
    lines = [f"| row | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for row in trained.plan.rows:
        cells = []
        for workers in sizes:
            share = trained.best(row, workers).of_limit
            cells.append(f"{share * workers:.2f} ({share:.2f})")
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "```bash", f"./scripts/bench {SCALING}", "```"])


def commands() -> list[str]:
    """Return every command whose trainings on simulated clusters the tables are made from, once."""
    judged = [claim.command for claims in CLAIMS.values() for claim in claims if claim.find]
    return list(dict.fromkeys([*filter(is_trained, judged), SCALING]))
