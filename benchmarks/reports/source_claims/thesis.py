"""Claims of the thesis on NFDT, HFDT and DDC-ASGD."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.reports.claims import Claim, CommandResults, ReportFigures, Verdict
from benchmarks.workloads.convergence_rows import SEQUENTIAL

DELAYED = ("asgd", "dc-asgd", "dc-asgd-a", "dc-asgd-k")


def _above(trained: CommandResults, workers: int, others: Sequence[str]) -> Verdict:
    own, *rest = (trained.best(row, workers) for row in ("ddc-asgd", *others))
    figure = "; ".join(case.scores for case in (trained.best(SEQUENTIAL), own, *rest))
    return Verdict(f"accuracy in % {figure}", all(own.score > case.score for case in rest))


def _little_lost(trained: CommandResults, workers: int, speeds: str) -> Verdict:
    """Judge by ``ddc-asgd``, and show what other rows of the command have been trained."""
    alone, own = trained.best(SEQUENTIAL), trained.best("ddc-asgd", workers, speeds)
    cases = [own, *trained.measured(set(trained.plan.rows) - {own.row, SEQUENTIAL}, workers, speeds)]
    figure = "; ".join([alone.scores, *(f"{case.scores} ({case.score - alone.score:+.1f})" for case in cases)])
    return Verdict(f"accuracy in % {figure}", alone.score - own.score <= LITTLE)


def _limited_by_workers(trained: CommandResults) -> Verdict:
    few, many = min(trained.plan.workers), max(trained.plan.workers)
    parts, kept = [], {}
    for row in ("dc-asgd-k", "ddc-asgd"):
        cases = [trained.best(row, workers) for workers in trained.plan.workers]
        parts.append(f"`{row}` " + ", ".join(f"{case.score:.1f}" for case in cases))
        kept[row] = trained.best(row, few).score - trained.best(row, many).score
    sizes = ", ".join(map(str, trained.plan.workers))
    return Verdict(f"accuracy in % on {sizes} workers: {'; '.join(parts)}", kept["dc-asgd-k"] > kept["ddc-asgd"])


def _by_each_delay(trained: CommandResults) -> Verdict:
    own, plain, scaled = (trained.best(row) for row in ("ddc-asgd", "asgd", "staleness-scaled"))
    delays = own.worker_staleness
    figure = f"mean staleness of a worker {min(delays):.1f} to {max(delays):.1f}; accuracy in % "
    figure += "; ".join(case.scores for case in (own, plain, scaled))
    return Verdict(figure, own.score > max(plain.score, scaled.score))


def _as_fast_as_by_hand(report: ReportFigures) -> Verdict:
    ratios = {launcher: report.ratio(f"hfdt/handwritten@{launcher}") for launcher in ("mpirun", "horovodrun")}
    figure = "; ".join(f"{ratio:.2f} times as fast under `{launcher}`" for launcher, ratio in ratios.items())
    return Verdict(figure, all(ratio >= AS_FAST for ratio in ratios.values()))


FASHION = "convergence --workers 8 --speeds equal --rows sequential,ddc-asgd,asgd,dc-asgd,dc-asgd-a,dc-asgd-k"
SMALL_CNN = (
    "convergence --task cifar10-cnn16 --workers 8 --speeds equal --rates 0.05,0.01"
    " --rows sequential,ddc-asgd,asgd,dc-asgd,dc-asgd-a,dc-asgd-k"
)
RESNET = "convergence --task cifar10-resnet8 --epochs 14 --workers 8,32 --speeds equal --seeds 1"
LONGER = (
    "convergence --task cifar10-resnet8 --epochs 40 --workers 8,32 --speeds equal,unequal"
    " --rows sequential,ddc-asgd,auto,h-ps,group-sync,local-ddc,sync-scaled"
)
LITTLE = 1.5  # points
AS_FAST = 0.97  # the target of the benchmark
K_WORKERS = "convergence --workers 2,4,8,16 --speeds equal --rows dc-asgd-k,ddc-asgd"
DELAYS = "convergence --workers 8 --speeds halves --rows ddc-asgd,asgd,staleness-scaled"
MLP = "Fashion-MNIST, an MLP, 3 epochs"
RESNET8 = "CIFAR-10 at 16 by 16 pixels, ResNet-8, 14 epochs"
THESIS = (
    Claim(
        "DDC above ASGD, DC-ASGD and DC-ASGDK",
        "no figure",
        FASHION,
        f"{MLP}, 8 workers, one machine's rate",
        partial(_above, workers=8, others=DELAYED),
    ),
    Claim(
        "the same on CIFAR-10",
        "no figure",
        SMALL_CNN,
        "CIFAR-10 at 16 by 16 pixels, a CNN, 3 epochs, 8 workers, each row at the better of two rates",
        partial(_above, workers=8, others=DELAYED),
    ),
    *(
        Claim(
            f"the same on CIFAR-10, {workers} workers",
            "no figure",
            f"{RESNET} --rows sequential,ddc-asgd,asgd,dc-asgd-a,dc-asgd-k",
            f"{RESNET8}, one machine's rate",
            partial(_above, workers=workers, others=("asgd", "dc-asgd-a", "dc-asgd-k")),
        )
        for workers in (8, 32)
    ),
    Claim(
        "DC-ASGDK is limited by the number of workers",
        "no figure",
        K_WORKERS,
        f"{MLP}, one machine's rate",
        _limited_by_workers,
    ),
    Claim(
        "each gradient is compensated by its own delay",
        "no figure",
        DELAYS,
        f"{MLP}, 8 workers, half of them four times as slow, one machine's rate",
        _by_each_delay,
    ),
    *(
        Claim(
            f"little is lost in long trainings, {workers} {speeds} workers",
            f"no figure; {LITTLE} points are little here",
            LONGER,
            "CIFAR-10 at 16 by 16 pixels, ResNet-8, 40 epochs, one machine's rate",
            partial(_little_lost, workers=workers, speeds=speeds),
        )
        for speeds in ("equal", "unequal")
        for workers in (8, 32)
    ),
    Claim(
        "HFDT as fast as Horovod by hand",
        "no figure",
        "hfdt --json benchmarks/results/hfdt.json",
        "2 ranks on one machine, the median of three models; the faster of two loops, with XLA and without",
        _as_fast_as_by_hand,
    ),
)
