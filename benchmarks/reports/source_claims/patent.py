"""Claims of the patent on groups of workers (CN107018184A), and of Grouping-SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from benchmarks.reports.claims import Claim, CommandResults, ReportFigures, RowResults, Verdict
from benchmarks.reports.source_claims.thesis import MLP

TARGET = 80.0  # % of test images, that times are compared at
LOW, HIGH = "unequal@100", "unequal@1000"


def _fewer_requests(trained: CommandResults) -> Verdict:
    flat, grouped = (trained.best(row) for row in ("asgd", "group-sync"))
    figure = f"gradients per epoch: flat {flat.pushes:.0f}, grouped {grouped.pushes:.0f}"
    return Verdict(figure, grouped.pushes < flat.pushes)


def _sooner(trained: CommandResults, speeds: str, others: Sequence[str], least: float) -> Verdict:
    own, *rest = (trained.best(row, speeds=speeds) for row in ("group-sync", *others))
    return _times(own, rest, least)


def _times(own: RowResults, others: Sequence[RowResults], least: float) -> Verdict:
    mine = own.seconds_to(TARGET)
    ratios = [other.seconds_to(TARGET) / mine if math.isfinite(mine) else 0.0 for other in others]
    figure = f"virtual s to {TARGET:.0f} %: " + "; ".join(_time(case) for case in (own, *others))
    return Verdict(figure, all(ratio >= least for ratio in ratios))


def _time(case: RowResults) -> str:
    seconds = case.seconds_to(TARGET)
    reached = f"{seconds:.1f}" if math.isfinite(seconds) else "not reached"
    return f"`{case.row}` {reached} (lr {case.rate:g})"


def _sooner_on_machines(report: ReportFigures) -> Verdict:
    seconds = {peer: report.value("hybrid", peer, "s to target") for peer in ("group-sync", "allreduce", "auto")}
    figure = "; ".join(f"`{peer}` {value:.1f}" for peer, value in seconds.items())
    sooner = seconds["allreduce"] / seconds["group-sync"]
    return Verdict(f"s to 84 %: {figure}; {sooner:.2f} times as soon as `allreduce`", sooner >= 1.2)


def _shares_by_speed(trained: CommandResults) -> Verdict:
    own, fixed = (trained.best(row) for row in ("group-sync", "group-sync-fixed"))
    figure = f"virtual s {own.seconds:.1f}; batches of one size {fixed.seconds:.1f}"
    return Verdict(f"{figure}; accuracy in % {own.scores}; {fixed.scores}", own.seconds < fixed.seconds)


UNEQUAL = "convergence --workers 8 --speeds unequal --rows group-sync,group-sync-fixed,asgd,ssp,bsp"
FLUCTUATING = "convergence --workers 8 --speeds slowed,changing --rows group-sync,bsp,ddc-asgd"
LINKS = (
    "convergence --workers 8 --speeds unequal@100,unequal@1000"
    " --rows bsp,ddc-asgd,ddc-finish-together,ddc-overlap,ddc-adaptive,h-ps,group-sync"
)
EIGHT = f"{MLP}, 8 workers, two of them twice and two five times as slow"
PATENT = (
    Claim("fewer requests reach the server", "no figure", UNEQUAL, EIGHT, _fewer_requests),
    Claim(
        "sooner than synchronous, asynchronous and stale synchronous SGD",
        "1.2 to 3.7 times",
        UNEQUAL,
        f"{EIGHT}, one machine's rate; links cost nothing",
        partial(_sooner, speeds="unequal", others=("bsp", "asgd", "ssp"), least=1.2),
    ),
    Claim("more data for faster nodes", "no figure", UNEQUAL, EIGHT, _shares_by_speed),
    Claim(
        "less load of the server's link",
        "no figure",
        LINKS,
        f"{EIGHT}; all links 100 Mbit/s",
        partial(_sooner, speeds=LOW, others=("bsp", "ddc-asgd"), least=1.0),
    ),
    *(
        Claim(
            f"also in homogeneous clusters {of}",
            "no figure",
            FLUCTUATING,
            f"{MLP}, 8 equal workers, {how}, one machine's rate",
            partial(_sooner, speeds=speeds, others=("bsp", "ddc-asgd"), least=1.0),
        )
        for speeds, of, how in (
            ("slowed", "whose speeds fluctuate", "each in turn three times as slow for a tenth of the time"),
            ("changing", "with losses", "half of which leave for a third of the time; forming a group takes 10 s"),
        )
    ),
    Claim(
        "sooner than synchronous SGD on machines",
        "1.2 to 3.7 times",
        "machines --parts hybrid --json benchmarks/results/machines.json",
        "Fashion-MNIST, a CNN, 4 machines of namespaces of speeds 1, 1, 4, 4, links of 1 Gbit/s",
        _sooner_on_machines,
    ),
)
