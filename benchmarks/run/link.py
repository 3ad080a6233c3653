"""Links of 100 Mbit/s and 1 Gbit/s: steps per second with fixed and adaptive codecs, and the accuracy of trainings."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import nfdt
from benchmarks.reports.report import Report, Row, arguments
from benchmarks.run import accuracy
from benchmarks.run.wire import SEED
from benchmarks.workloads.shards import TOKEN, layout_of, serve_shard, served
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import AXES
from nfdt.core.wire.job_token import worker_token
from nfdt.transport.choice import make_choice
from nfdt.transport.emulated_link import EmulatedLink
from nfdt.transport.stream import StreamClient

SPEEDS = {"100Mbit": 100.0, "1Gbit": 1000.0}
LATENCY_MS = 0.2
ALGORITHM = "asgd"
FIXED = [name for name in AXES["codec"] if name != "adaptive"]


@dataclass(frozen=True)
class Work:
    """Extent of the measurements.

    Attributes:
        size: Number of parameters.
        compute_s: Emulated computation time of a step in seconds; the worker sleeps, so that it needs no core.
        learn: Steps that the adaptive codec takes before it is measured.
        steps: Steps of a run of the adaptive codec, which probes another codec in every 25th push; others take fewer.
        runs: Runs of every peer, interleaved.
        seeds: Seeds of the trainings.
        epochs: Epochs of a training.
    """

    size: int
    compute_s: float
    learn: int
    steps: int
    runs: int
    seeds: tuple[int, ...]
    epochs: int


FULL = Work(size=2_500_000, compute_s=0.1, learn=60, steps=25, runs=3, seeds=(0, 1, 2, 3, 4), epochs=20)
QUICK = Work(size=250_000, compute_s=0.02, learn=45, steps=25, runs=3, seeds=(0,), epochs=4)


class Peer:
    """Worker on a link, with a codec."""

    def __init__(self, address: str, work: Work, codec: str, mbit: float) -> None:
        self._work = work
        choice = make_choice(resolve_algorithm(ALGORITHM, codec=codec), work.size)
        link = EmulatedLink(mbit, LATENCY_MS, threading.Event())
        name = f"{codec} {mbit:g}"
        token = worker_token(TOKEN, name)
        self.client = StreamClient([address], layout_of(work.size), name, token, choice=choice, emulated=link)
        self._gradients = np.random.default_rng(SEED).normal(0, 0.01, (4, work.size)).astype(np.float32)
        self.client.pull()

    def steps_per_s(self, steps: int) -> float:
        """Run a number of steps (compute, push, receive the reply) and return the steps per second."""
        began = time.perf_counter()
        for step in range(steps):
            time.sleep(self._work.compute_s)
            self.client.push(self._gradients[step % 4], samples=1, compute_s=self._work.compute_s)
        return steps / (time.perf_counter() - began)


@contextmanager
def peers_of(work: Work, codecs: list[str], mbit: float) -> Iterator[dict[str, Peer]]:
    """Start one peer per codec, all connected to one shard."""
    with ExitStack() as stack:
        address, _ = stack.enter_context(served(serve_shard, layout_of(work.size), ALGORITHM, 0, 1, 8, "adaptive"))
        ready = {}
        for codec in codecs:
            ready[codec] = Peer(address, work, codec, mbit)
            stack.callback(ready[codec].client.close)
        yield ready


def speed(report: Report, case: str, work: Work, codecs: list[str], mbit: float) -> None:
    """Measure the steps per second of every codec in turn, after the adaptive codec has measured the link."""
    found: dict[str, list[float]] = {codec: [] for codec in codecs}
    with peers_of(work, codecs, mbit) as ready:
        for codec, peer in ready.items():
            peer.steps_per_s(work.learn if codec == "adaptive" else 2)
        for _ in range(work.runs):
            for codec, peer in ready.items():
                steps = work.steps if codec == "adaptive" else work.steps * 2 // 5
                found[codec].append(peer.steps_per_s(steps))
        decided = ready["adaptive"].client.codecs["decisions"]
    report.rows += [Row(case, codec, "steps/s", values) for codec, values in found.items()]
    best = max((codec for codec in codecs if codec != "adaptive"), key=lambda codec: statistics.median(found[codec]))
    pairs = zip(found["adaptive"], found[best], strict=True)
    report.ratios[f"adaptive/best-fixed@{case}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    chosen = (decided[-1]["push"], decided[-1]["reply"]) if decided else ("identity", "identity")
    report.notes.append(f"{case}: the best fixed codec is {best}; adaptive pushes {chosen[0]}, receives {chosen[1]}.")


def learnt(work: Work, codec: str, mbit: float | None) -> list[float]:
    """Return the test accuracy in % of trainings with this codec, one value per seed."""
    options: dict[str, Any] = {"emulate": {"bandwidth_mbit": (mbit,) * accuracy.WORKERS}} if mbit else {}
    options["codec"] = codec
    with nfdt.session(workers=accuracy.WORKERS, algorithm="ddc-asgd", **options):
        return [100 * accuracy.train(accuracy.RATES[-1], seed, work.epochs).accuracy for seed in work.seeds]


def run(report: Report, work: Work, speeds: dict[str, float], codecs: list[str], trained: dict[str, float]) -> None:
    """Measure all links; ``trained``: links on which the adaptive codec is trained and compared with identity."""
    for case, mbit in speeds.items():
        speed(report, case, work, codecs, mbit)
    if not trained:
        return
    exact = learnt(work, "identity", None)
    report.rows.append(Row("digits", "identity", "% test accuracy", exact))
    for case, mbit in trained.items():
        got = learnt(work, "adaptive", mbit)
        report.rows.append(Row("digits", f"adaptive, {case}", "% test accuracy", got))
        report.ratios[f"points over identity@{case}"] = statistics.mean(got) - statistics.mean(exact)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    work = QUICK if options.quick else FULL
    report = Report("link", [SEED, *work.seeds])
    codecs = [*(("identity", "int8", "int4") if options.quick else FIXED), "adaptive"]
    run(report, work, SPEEDS, codecs, {"100Mbit": 100.0} if options.quick else SPEEDS)
    report.finish(options.json)


if __name__ == "__main__":
    main()
