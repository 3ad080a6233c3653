"""A DLRM-like model with large embedding tables: samples per second, and memory of a worker, of each peer."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import psutil

from benchmarks.peers.keras2 import python_of_keras2
from benchmarks.peers.processes import PeerFailed, run_together, tensorflow_cluster
from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.recommender import (
    ON_SHARDS,
    ON_WORKERS,
    PARAMETER_SERVER,
    PLAIN,
    SEED,
    Recommendation,
    Trained,
)

PEERS = {"plain": PLAIN, "workers": ON_WORKERS, "shards": ON_SHARDS, "servers": PARAMETER_SERVER}


def measure(peer: str, training: Recommendation, keras2: Path | None) -> Trained:
    """Train once with a peer, in processes of its own.

    Raises:
        PeerFailed: it has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [training.dump(), str(result)]
        if peer == PARAMETER_SERVER:
            command = [str(keras2), "-m", "benchmarks.peers.recommender_servers", *arguments]
            roles = tensorflow_cluster(chief=1, worker=training.workers, ps=training.shards)
            run_together([command] * len(roles), roles, needed=1)
        else:
            run_together([[sys.executable, "-m", "benchmarks.workloads.recommender", peer, *arguments]])
        return Trained(**json.loads(result.read_text()))


def run(
    report: Report, training: Recommendation, runs: int, keras2: Path | None, wanted: Collection[str] = PEERS
) -> None:
    """Measure the wanted peers by turns; one that fails, or whose tables do not fit into the memory, is a note."""
    case = f"{training.table_mb:g} MB of tables, {training.optimizer}, {training.workers} workers"
    case += f", {training.shards} shards"
    memory_mb = memory()
    peers = [peer for name, peer in PEERS.items() if name in wanted and (peer != PARAMETER_SERVER or keras2)]
    for peer in [peer for peer in peers if training.needs_mb(peer) > memory_mb]:
        peers.remove(peer)
        need = f"{training.needs_mb(peer):,.0f} MB, and the machine has {memory_mb:,.0f}"
        report.notes.append(f"{case}: {peer} is left out, as its tables may take {need}")
    for _ in range(runs):
        for peer in peers:
            try:
                found = measure(peer, training, keras2)
            except PeerFailed as error:
                report.notes.append(f"{case}: {peer} failed: {str(error).splitlines()[-1]}")
                continue
            report.add(case, peer, "samples/s", found.samples_per_s(training))
            report.add(case, peer, "MB of a worker at its peak", max(found.worker_mb))
    others = [(name, peer) for name, peer in PEERS.items() if peer != ON_SHARDS]
    for name, unit in (("speed", "samples/s"), ("memory", "MB of a worker at its peak")):
        ours = report.runs(case, ON_SHARDS, unit)
        for other, peer in others:
            if pairs := list(zip(ours, report.runs(case, peer, unit), strict=False)):
                ratio = statistics.median(mine / theirs for mine, theirs in pairs)
                report.ratios[f"{name} shards/{other}@{training.table_mb:g} MB, {training.shards} shards"] = ratio


def memory() -> float:
    """Return the memory of this machine, in MB."""
    return float(psutil.virtual_memory().total / 2**20)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--mb", type=float, nargs="+", help="sizes of all tables, in MB (default: 1024; quick: 64)")
    parser.add_argument("--samples", type=int, help="samples per epoch (default: 65536; quick: 16384)")
    parser.add_argument("--runs", type=int, help="trainings of each peer (default: 3; quick: 1)")
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"), default="adagrad")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shards", type=int, nargs="+", default=[2], help="numbers of shards, or of servers")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="only these")
    options = parser.parse_args()
    table_mb, samples, runs = (64.0, 16_384, 1) if options.quick else (1024.0, 65_536, 3)
    report = Report("recommender", [SEED])
    keras2 = python_of_keras2(install=False)
    if keras2 is None:
        report.notes.append(f"{PARAMETER_SERVER}: left out; scripts/bench hfdt makes its environment")
    for size, shards in itertools.product(options.mb or [table_mb], options.shards):
        shape = {"optimizer": options.optimizer, "workers": options.workers, "shards": shards}
        run(
            report,
            Recommendation(size, options.samples or samples, **shape),
            options.runs or runs,
            keras2,
            options.peers,
        )
    report.finish(options.json)


if __name__ == "__main__":
    main()
