"""The claims of the publications that NFDT follows, and how our figures judge them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from benchmarks.reports.claims import Claim, CommandResults, ReportFigures, RowResults, Verdict, is_trained
from benchmarks.reports.study_results import Result
from benchmarks.workloads.convergence_rows import SEQUENTIAL

TARGET = 80.0  # % of test images, that times are compared at
NEAR = 1.1  # times the synchronous loss
KEPT = 0.95  # of the speed
HALVES = "4 workers, two of them four times as slow; momentum 0"
LOW, HIGH = "unequal@100", "unequal@1000"

# ---- DBS-SGD


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
    " --rows sequential,dbs-sgd,asgd,n-softsync,bsp --seeds 2"
)
CIFAR = (
    "convergence --task cifar10-cnn16 --workers 4 --speeds halves --momentum 0 --rates 0.1,0.2"
    " --rows sequential,dbs-sgd,asgd,n-softsync,bsp --seeds 1"
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

# ---- DDC-ASGD, NFDT and HFDT

DELAYED = ("asgd", "dc-asgd", "dc-asgd-a", "dc-asgd-k")


def _above(trained: CommandResults, workers: int, others: Sequence[str]) -> Verdict:
    own, *rest = (trained.best(row, workers) for row in ("ddc-asgd", *others))
    figure = "; ".join(case.scores for case in (trained.best(SEQUENTIAL), own, *rest))
    return Verdict(f"accuracy in % {figure}", all(own.score > case.score for case in rest))


def _little_lost(trained: CommandResults, workers: int) -> Verdict:
    alone, own = trained.best(SEQUENTIAL), trained.best("ddc-asgd", workers)
    lost = alone.score - own.score
    return Verdict(f"accuracy in % {alone.scores}; {own.scores} ({-lost:+.1f})", lost <= LITTLE)


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


FASHION = "convergence --workers 8 --speeds equal --rows sequential,ddc-asgd,asgd,dc-asgd,dc-asgd-a,dc-asgd-k"
SMALL_CNN = (
    "convergence --task cifar10-cnn16 --workers 8 --speeds equal --rates 0.05,0.01"
    " --rows sequential,ddc-asgd,asgd,dc-asgd,dc-asgd-a,dc-asgd-k --seeds 1"
)
RESNET = "convergence --task cifar10-resnet8 --epochs 14 --workers 8,32 --speeds equal --seeds 1"
LONGER = "convergence --task cifar10-resnet8 --epochs 40 --workers 8,32 --speeds equal --rows sequential,ddc-asgd"
LITTLE = 1.5  # points
K_WORKERS = "convergence --workers 2,4,8,16 --speeds equal --rows dc-asgd-k,ddc-asgd --seeds 1"
DELAYS = "convergence --workers 8 --speeds halves --rows ddc-asgd,asgd,staleness-scaled --seeds 1"
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
            f"little is lost in long trainings, {workers} workers",
            f"no figure; {LITTLE} points are little here",
            LONGER,
            "CIFAR-10 at 16 by 16 pixels, ResNet-8, 40 epochs, one machine's rate",
            partial(_little_lost, workers=workers),
        )
        for workers in (8, 32)
    ),
    Claim("HFDT as fast as Horovod by hand", "no figure", "hfdt", "needs an idle machine"),
)

# ---- the patent, and Grouping-SGD


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


def _shares_by_speed(trained: CommandResults) -> Verdict:
    own, fixed = (trained.best(row) for row in ("group-sync", "group-sync-fixed"))
    figure = f"virtual s {own.seconds:.1f}; batches of one size {fixed.seconds:.1f}"
    return Verdict(f"{figure}; accuracy in % {own.scores}; {fixed.scores}", own.seconds < fixed.seconds)


UNEQUAL = "convergence --workers 8 --speeds unequal --rows group-sync,group-sync-fixed,asgd,ssp,bsp --seeds 1"
FLUCTUATING = "convergence --workers 8 --speeds slowed --rows group-sync,bsp,ddc-asgd --seeds 1"
LINKS = (
    "convergence --workers 8 --speeds unequal@100,unequal@1000 --seeds 1"
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
    Claim(
        "also in homogeneous clusters with fluctuation",
        "no figure",
        FLUCTUATING,
        f"{MLP}, 8 equal workers, each in turn three times as slow for a tenth of the time, one machine's rate",
        partial(_sooner, speeds="slowed", others=("bsp",), least=1.0),
    ),
    Claim("the same on machines", "1.2 to 3.7 times", "machines --parts hybrid", "needs an idle machine, and root"),
)

# ---- H-PS


def _shorter(trained: CommandResults, speeds: str, row: str, others: Sequence[str], least: float) -> Verdict:
    own = trained.best(row, speeds=speeds)
    ratios = {other: trained.best(other, speeds=speeds).seconds / own.seconds for other in others}
    figure = "; ".join(f"{ratio:.2f} times as fast as `{other}`" for other, ratio in ratios.items())
    return Verdict(f"{figure}; accuracy in % {own.scores}", all(ratio >= least for ratio in ratios.values()))


def _faster(report: ReportFigures, link: str, way: str, least: float) -> Verdict:
    """Judge by ``ddc-asgd`` with an exchange in every step; the whole system by ``bsp``, too."""
    peers = {"every-step, short epochs": "ddc-asgd", **({"bsp": "bsp"} if way == "h-ps" else {})}
    own = report.value(link, way, "samples/s")
    ratios = {name: own / report.value(link, peer, "samples/s") for peer, name in peers.items()}
    figure = "; ".join(f"{ratio:.2f} times as fast as `{name}`" for name, ratio in ratios.items())
    return Verdict(figure, all(ratio >= least for ratio in ratios.values()))


FOUR = "Fashion-MNIST, an MLP of 2.5 M weights, 4 machines of namespaces of speeds 1, 1, 2, 4"
ON_MACHINES = (
    "slow --links 100,1000 --ways 'bsp;every-step, short epochs;every-step, tasks by speed;every-step, overlap;"
    "every-step, quantization;h-ps' --json benchmarks/results/slow.json"
)
H_PS = (
    *(
        Claim(
            "the whole system: a shorter training",
            "1.4 to 3.5 times",
            LINKS,
            f"{EIGHT}; all links {mbit}",
            partial(_shorter, speeds=speeds, row="h-ps", others=("bsp", "ddc-asgd"), least=1.4),
        )
        for speeds, mbit in ((LOW, "100 Mbit/s"), (HIGH, "1 Gbit/s"))
    ),
    *(
        Claim(
            f"{part} alone",
            "no figure",
            LINKS,
            f"the same, {mbit}",
            partial(_shorter, speeds=speeds, row=row, others=("ddc-asgd",), least=1.02),
        )
        for row, part in (
            ("ddc-finish-together", "tasks by speed"),
            ("ddc-overlap", "overlap"),
            ("ddc-adaptive", "quantization"),
        )
        for speeds, mbit in ((LOW, "100 Mbit/s"), (HIGH, "1 Gbit/s"))
    ),
    *(
        Claim(
            f"{part} on machines",
            theirs,
            ON_MACHINES,
            f"{FOUR if way == 'h-ps' else 'the same'}, links of {link}",
            partial(_faster, link=link, way=way, least=least),
        )
        for way, part, theirs, least in (
            ("h-ps", "the whole system", "1.4 to 3.5 times", 1.4),
            ("every-step, tasks by speed", "tasks by speed alone", "no figure", 1.02),
            ("every-step, overlap", "overlap alone", "no figure", 1.02),
            ("every-step, quantization", "quantization alone", "no figure", 1.02),
        )
        for link in ("100 Mbit/s", "1000 Mbit/s")
    ),
)

# ---- strong scaling

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


def _change(own: float, other: float) -> str:
    return f"{100 * (own / other - 1):+.0f} %".replace("-", "−")
