"""Claims of DBS-SGD (Ji et al., 2019)."""

from __future__ import annotations

from functools import partial

from benchmarks.reports.claims import Claim, CommandResults, Verdict
from benchmarks.workloads.convergence_rows import SEQUENTIAL

NEAR = 1.1  # times the synchronous loss
KEPT = 0.95  # of the speed
HALVES = "4 workers, two of them four times as slow; momentum 0"


def _loss(trained: CommandResults, *, at_most: float) -> Verdict:
    own, *others = (trained.best(row) for row in ("dbs-sgd", "asgd", "n-softsync"))
    figure = "; ".join([own.losses, *(f"{other.losses} ({_change(own.loss, other.loss)})" for other in others)])
    return Verdict(f"test loss {figure}", all(own.loss <= at_most * other.loss for other in others))


def _accuracy(trained: CommandResults) -> Verdict:
    own, *others = (trained.best(row) for row in ("dbs-sgd", "asgd", "n-softsync"))
    figure = "; ".join([own.scores, *(f"{other.scores} ({own.score - other.score:+.1f})" for other in others)])
    return Verdict(f"accuracy in % {figure}", all(own.score >= other.score + 10 for other in others))


def _near_synchronous(trained: CommandResults) -> Verdict:
    own, synchronous, alone = (trained.best(row) for row in ("dbs-sgd", "bsp", SEQUENTIAL))
    figure = f"test loss {own.losses}; {synchronous.losses}; one machine {alone.losses}"
    return Verdict(figure, own.loss <= NEAR * synchronous.loss)


def _speed_kept(trained: CommandResults) -> Verdict:
    own, other, synchronous = (trained.best(row) for row in ("dbs-sgd", "asgd", "bsp"))
    figure = f"virtual s `dbs-sgd` {own.seconds:.1f}; `asgd` {other.seconds:.1f}; `bsp` {synchronous.seconds:.1f}"
    return Verdict(figure, KEPT * own.seconds <= other.seconds)


def _staleness_of_nodes(trained: CommandResults) -> Verdict:
    cases = [trained.best(row) for row in ("asgd", "dbs-sgd")]
    of_nodes = [sum(case.worker_staleness) / len(case.worker_staleness) for case in cases]
    of_updates = [case.results[0].mean_staleness for case in cases]
    figure = "; ".join(
        f"`{case.row}` {nodes:.2f} per node, {updates:.2f} per update"
        for case, nodes, updates in zip(cases, of_nodes, of_updates, strict=True)
    )
    return Verdict(figure, of_nodes[1] < of_nodes[0])


MNIST = (
    "convergence --task mnist --workers 4 --speeds halves --momentum 0 --rates 0.1,0.2"
    " --rows sequential,dbs-sgd,asgd,n-softsync,bsp"
)
CIFAR = (
    "convergence --task cifar10-cnn16 --workers 4 --speeds halves --momentum 0 --rates 0.1,0.2"
    " --rows sequential,dbs-sgd,asgd,n-softsync,bsp"
)
MNIST_WORK = f"MNIST, an MLP, 3 epochs, {HALVES}, each row at the better of two rates"
CIFAR_WORK = f"CIFAR-10 at 16 by 16 pixels, a CNN, 3 epochs, {HALVES}, each row at the better of two rates"
DBS_SGD = (
    Claim("less loss than ASGD and n-softsync on MNIST", "−60 %", MNIST, MNIST_WORK, partial(_loss, at_most=0.4)),
    Claim("more accuracy on CIFAR-10", "+10 %", CIFAR, CIFAR_WORK, _accuracy),
    Claim("less loss on CIFAR-10", "−10 %", CIFAR, CIFAR_WORK, partial(_loss, at_most=0.9)),
    Claim("near the synchronous curve", "no figure", MNIST, MNIST_WORK, _near_synchronous),
    Claim("the same on CIFAR-10", "no figure", CIFAR, CIFAR_WORK, _near_synchronous),
    Claim("the speed-up of ASGD is kept", "no figure", MNIST, "the same; links cost nothing", _speed_kept),
    Claim(
        "less staleness of a node",
        "no figure; steps of 1, 1, 4, 4 give 5.25 and 3.0",
        MNIST,
        "the same, means",
        _staleness_of_nodes,
    ),
)


def _change(own: float, other: float) -> str:
    return f"{100 * (own / other - 1):+.0f} %".replace("-", "−")
