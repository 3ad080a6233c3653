"""Samples per second of an unmodified script on 2 ranks, compared with hand-written Horovod loops and with MWMS."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.keras2 import packages, python_of_keras2
from benchmarks.peers.processes import ROOT, PeerFailed, run_together, tensorflow_cluster
from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.epochs import Measured, Work, measured, now
from benchmarks.workloads.images import training_images
from benchmarks.workloads.models import SEED
from nfdt.launch.horovod import host_info
from nfdt.launch.horovod_command import RingShape, ring_command

RANKS = 2
BATCH = 128
LAUNCHERS = ("mpirun", "horovodrun")
# Whole global batches: hand-written loops leave out a tail.
WORK = {"mlp": Work(59_904, 4, 3), "cnn": Work(10_240, 3, 3), "10M": Work(10_240, 3, 3)}
QUICK = {"mlp": Work(12_800, 3, 1)}
BY_HAND = {"plain": "by hand", "xla": "by hand, XLA"}
MIRRORED = "tf_keras, MWMS"
QUICK_S, MIRRORED_S = 58.0, 12.0  # a quick run leaves out MWMS if the rest took too long


class Peers:
    """Runs of one case with each peer, on the same file of images.

    Args:
        folder: Directory of that file and the results.
        case: Name of the model.
        work: Extent of the training.
        keras2: Python of the environment with tf_keras.
    """

    def __init__(self, folder: Path, case: str, work: Work, keras2: Path | None) -> None:
        self._case, self._work, self._keras2 = case, work, keras2
        self._data, self._result = folder / f"{case}.npz", folder / "begins.json"

    def by_hand(self, launcher: str) -> dict[str, Measured]:
        """Train both loops of benchmarks/peers/horovod_loop.py in one launch."""
        program = [sys.executable, "-m", "benchmarks.peers.horovod_loop", *self._arguments()]
        command = ring_command(RingShape(RANKS, launcher), program, host_info())
        found = self._run([command], [{}])
        return {BY_HAND[name]: each for name, each in found.items()}

    def hfdt(self, launcher: str) -> dict[str, Measured]:
        """Train an ordinary script with ``hfdt run``."""
        hfdt = [Path(sys.executable).with_name("hfdt"), "run", "-np", RANKS, "--launcher", launcher]
        command = [*map(str, hfdt), str(ROOT / "benchmarks" / "workloads" / "keras_script.py"), *self._arguments()]
        return {"hfdt": self._run([command], [{}])[""]}

    def mirrored(self) -> dict[str, Measured]:
        """Train tf_keras with MultiWorkerMirroredStrategy; without its environment, return no result."""
        if self._keras2 is None:
            return {}
        command = [str(self._keras2), "-m", "benchmarks.peers.mirrored_loop", *self._arguments()]
        return {MIRRORED: self._run([command] * RANKS, tensorflow_cluster(worker=RANKS))[""]}

    def _arguments(self) -> list[str]:
        epochs = str(self._work.epochs + 1)
        return [self._case, "--data", str(self._data), "--batch", str(BATCH), "--epochs", epochs, *self._to()]

    def _to(self) -> list[str]:
        return ["--result", str(self._result)]

    def _run(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> dict[str, Measured]:
        began = now()
        run_together(commands, environments)
        begins = json.loads(self._result.read_text())
        by_name = begins if isinstance(begins, dict) else {"": begins}
        return {name: measured(moments, self._work.samples, began) for name, moments in by_name.items()}


def run(
    report: Report, data_dir: Path | None, work: Mapping[str, Work], keras2: Path | None, budget_s: float = float("inf")
) -> None:
    """Measure every case, all peers in turn; MWMS only while time remains."""
    deadline = now() + budget_s
    with tempfile.TemporaryDirectory() as folder:
        for case, chosen in work.items():
            training_images(chosen.samples, data_dir).save(Path(folder) / f"{case}.npz")
            peers = Peers(Path(folder), case, chosen, keras2)
            for _ in range(chosen.runs):
                _run_once(report, peers, case, deadline)
    _add_ratios(report, list(work))


def _run_once(report: Report, peers: Peers, case: str, deadline: float) -> None:
    for launcher in LAUNCHERS:
        for found in (peers.by_hand(launcher), peers.hfdt(launcher)):
            for peer, each in found.items():
                _add(report, f"{case} {launcher}", peer, each)
    if now() + MIRRORED_S > deadline:
        report.notes.append(f"{MIRRORED}: no time is left in this quick run")
        return
    try:
        found = peers.mirrored()
    except PeerFailed as error:
        print(f"bench: {MIRRORED} failed: {error}", file=sys.stderr)
        report.notes.append(f"{MIRRORED} on {case} failed: {str(error).splitlines()[-1]}")
        return
    for peer, each in found.items():
        _add(report, case, peer, each)


def _add(report: Report, case: str, peer: str, each: Measured) -> None:
    report.add(case, peer, "samples/s", each.samples_per_s)
    # The loop with XLA is trained second, in ranks that are already running.
    if peer != BY_HAND["xla"]:
        report.add(case, peer, "s of start-up", each.startup_s)


def _add_ratios(report: Report, cases: Sequence[str]) -> None:
    """Add ratios by run: to the faster of the two hand-written loops, and, over all launchers, to MWMS."""
    against_mirrored = []
    for launcher in LAUNCHERS:
        medians = []
        for case in cases:
            name = f"{case} {launcher}"
            ours = _speeds(report, name, "hfdt")
            hands = [
                max(pair) for pair in zip(*(_speeds(report, name, peer) for peer in BY_HAND.values()), strict=True)
            ]
            medians.append(_median_ratio(ours, hands))
            report.ratios[f"hfdt/handwritten@{launcher}@{case}"] = medians[-1]
            if mirrored := _speeds(report, case, MIRRORED):
                against_mirrored.append(_median_ratio(ours, mirrored))
                report.ratios[f"hfdt/mwms@{launcher}@{case}"] = against_mirrored[-1]
        report.ratios[f"hfdt/handwritten@{launcher}"] = statistics.median(medians)
    if against_mirrored:
        report.ratios["hfdt/mwms"] = statistics.median(against_mirrored)


def _speeds(report: Report, case: str, peer: str) -> list[float]:
    return report.runs(case, peer, "samples/s")


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(o / t for o, t in zip(ours, theirs, strict=False))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("hfdt", [SEED], also=packages())
    keras2 = python_of_keras2(install=not options.quick)
    if keras2 is None:
        report.notes.append(f"{MIRRORED}: left out; its environment is made by the first run without --quick")
    if options.quick:
        run(report, options.data_dir, QUICK, keras2, QUICK_S)
    else:
        run(report, options.data_dir, WORK, keras2)
    report.finish(options.json)


if __name__ == "__main__":
    main()
