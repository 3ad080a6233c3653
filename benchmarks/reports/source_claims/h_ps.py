"""Claims of H-PS (Xian et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.reports.claims import Claim, CommandResults, ReportFigures, Verdict
from benchmarks.reports.source_claims.patent import EIGHT, HIGH, LINKS, LOW


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
