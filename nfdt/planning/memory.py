"""Memory of the processes of a job, from the size of its model; the formula of docs/memory.md.

All that grows with the model is a multiple of its weights or of its state. ``scripts/bench memory`` measures the
multiples, which are in one table, :data:`COSTS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import FEW_WORKERS, RULE_FACTS

MB = 10**6
ANCHORS = 3
"""Vectors of the weights to which the backups of more than :data:`FEW_WORKERS` workers are differences."""
AT_A_TIME = 4
"""Pushes that a shard receives and answers at a time, as a rule."""
JOINED_VECTORS = 1.8
"""Vectors of a worker that joins the weights of several shards."""
CODEC_VECTORS = 3.0
"""Vectors of a worker that encodes its gradients: what was not sent yet, and the weights before and after a delta."""

OWN_VECTORS = 2.0
"""Vectors of a worker that makes steps of its own: the weights since which it counts them, and the difference."""


@dataclass(frozen=True)
class ModelBytes:
    """Size of a model.

    Attributes:
        weights: Bytes of its trainable weights as float32: one *vector*.
        state: Bytes of its weights, its optimizer's variables and its untrained variables.
        on_shards: Bytes of those weights, tables of embeddings, that workers do not hold.
        made_weights: Bytes of those of them that shards make, which the script does not hold either.
        made_state: Bytes of these tables and of their optimizer variables, a part of the state.
    """

    weights: int
    state: int
    on_shards: int = 0
    made_weights: int = 0
    made_state: int = 0

    @property
    def sent(self) -> ModelBytes:
        """Size of what the script sends, and of its part of the state."""
        return ModelBytes(self.weights - self.made_weights, self.state - self.made_state)


@dataclass(frozen=True)
class ProcessCost:
    """Memory of a process, besides what :func:`estimate` derives from the algorithm.

    Attributes:
        base: Bytes that it takes with a tiny model: the interpreter, libraries and compiled code.
        weights: Vectors while it trains.
        states: Copies of the state while it trains.
        peak_weights: Vectors in addition, for a short time.
        peak_states: Copies of the state in addition, for a short time.
    """

    base: int
    weights: float = 0.0
    states: float = 0.0
    peak_weights: float = 0.0
    peak_states: float = 0.0

    def of(self, model: ModelBytes, more: float = 0.0) -> ProcessBytes:
        """Return the memory for a model, or the process's part of one; ``more``: further bytes while it trains."""
        steady = self.base + self.weights * model.weights + self.states * model.state + more
        peak = steady + self.peak_weights * model.weights + self.peak_states * model.state
        return ProcessBytes(round(steady), round(peak))


COSTS = {
    "client": ProcessCost(540 * MB, weights=0.3, states=1.0, peak_weights=2.2),
    "server": ProcessCost(200 * MB),
    "shard": ProcessCost(250 * MB, weights=0.5, states=1.0, peak_states=0.35),
    "worker": ProcessCost(180 * MB, weights=3.6, peak_weights=1.4),
    "rank": ProcessCost(300 * MB, weights=3.6, states=1.0, peak_weights=1.4),
}
"""Measured by ``scripts/bench memory``. The server's base includes its fork server. A rank is a worker of an allreduce,
which has the optimizer; it is estimated. The states of a shard's peak are snapshots, see :func:`snapshot_bytes`."""


@dataclass(frozen=True)
class ProcessBytes:
    """Memory of one process in bytes.

    Attributes:
        steady: While it trains.
        peak: The most that it takes: when the model is sent at first, when the state is copied, or at the end.
    """

    steady: int
    peak: int


@dataclass(frozen=True)
class JobMemory:
    """Memory of each process of a job."""

    client: ProcessBytes
    server: ProcessBytes
    shard: ProcessBytes
    worker: ProcessBytes

    def on_machine(self, *, client: bool, server: bool, shards: float, workers: int) -> int:
        """Return the most memory that those processes of the job take together which run on one machine, in bytes.

        Shards and the server have their peak at the same time, a snapshot; the client has its own before and after.
        """
        at_client, at_server = self.client if client else _NOTHING, self.server if server else _NOTHING
        in_snapshot = shards * self.shard.peak + at_server.peak + at_client.steady
        at_end = shards * self.shard.steady + at_server.steady + at_client.peak
        return round(max(in_snapshot, at_end) + workers * self.worker.peak)


_NOTHING = ProcessBytes(0, 0)


def estimate(model: ModelBytes, algorithm: AlgorithmSpec, *, workers: int, shards: int, shared: bool) -> JobMemory:
    """Estimate the memory of the processes of a job. Activations of workers, and data, are not counted.

    Args:
        model: Size of the whole model.
        algorithm: Algorithm of the job.
        workers: Number of workers.
        shards: Number of shards.
        shared: Whether workers and shards exchange gradients and weights through memory that they share.
    """
    part = ModelBytes(model.sent.weights // shards, model.sent.state // shards)
    held = ModelBytes(model.weights - model.on_shards, model.state)
    pairs = algorithm.overlap + 1 if shared else 0  # of a gradient and weights; each side counts a half
    encodes = algorithm.codec_facts.encodes
    buffers = (1 if encodes or not shared else 0) + 1  # for a gradient, and for the reply
    exchanged = pairs * workers + buffers * min(workers, AT_A_TIME)
    encoded, joined = CODEC_VECTORS if encodes else 0.0, JOINED_VECTORS if shards > 1 else 0.0
    steps_there = algorithm.topology_facts.allreduce or algorithm.exchange_facts.local
    shard, worker = COSTS["shard"], COSTS["rank" if steps_there else "worker"]
    own = OWN_VECTORS if algorithm.exchange_facts.local else 0.0
    # Tables that shards make are lent in place, and the rule's state of rows that nobody looks up takes no memory.
    others = _kept(part, algorithm, workers) + exchanged * part.weights + model.made_state // shards
    steady = shard.of(part, others).steady
    copied = shard.peak_states * snapshot_bytes(part, algorithm, workers)
    return JobMemory(
        COSTS["client"].of(model.sent),
        COSTS["server"].of(model),
        ProcessBytes(steady, round(steady + copied)),
        worker.of(held, (encoded + joined + own + max(pairs, 1)) * held.weights),
    )


@dataclass(frozen=True)
class MachineMemory:
    """Memory of a job on equal machines.

    Attributes:
        processes: What runs on each of them.
        count: Number of these machines.
        peak: Bytes that a job takes at most on each of them.
    """

    processes: str
    count: int
    peak: int


def by_machine(
    model: ModelBytes, algorithm: AlgorithmSpec, machines: Sequence[str], shards: int
) -> list[MachineMemory]:
    """Return the memory on every machine of a job, first on that of the script, then on a single one for all.

    Args:
        model: Size of the model.
        algorithm: Algorithm of the job.
        machines: Machine of each worker; empty: one of its own.
        shards: Number of shards, which run beside the script and the server.
    """
    shards_here = 0 if algorithm.topology_facts.allreduce else shards
    named, workers = Counter(filter(None, machines)), len(machines)
    groups = Counter([*named.values(), *[1] * (workers - named.total())])
    apart = estimate(model, algorithm, workers=workers, shards=shards, shared=False)
    together = estimate(model, algorithm, workers=workers, shards=shards, shared=True)
    beside = "" if not shards_here else f", {shards} shard{'s' if shards > 1 else ''}"
    here: dict[str, Any] = {"client": True, "server": True, "shards": shards_here}
    return [
        MachineMemory(f"script, server{beside}", 1, apart.on_machine(**here, workers=0)),
        *(
            MachineMemory(
                f"{size} worker{'s' if size > 1 else ''}",
                count,
                apart.on_machine(client=False, server=False, shards=0, workers=size),
            )
            for size, count in sorted(groups.items())
        ),
        MachineMemory("all on one machine", 1, together.on_machine(**here, workers=workers)),
    ]


def snapshot_bytes(model: ModelBytes, algorithm: AlgorithmSpec, workers: int) -> float:
    """Return the size of a snapshot of the shards: the state, and the records of the update rule."""
    facts, sent = RULE_FACTS[algorithm.update_rule], model.sent
    records = (facts.state + facts.worker_state * workers) * model.weights
    if facts.reserve:
        records += max(sent.state - sent.weights, sent.weights)
    if facts.reserve and model.made_state == model.made_weights:  # rows with an optimizer that has variables have none
        records += model.made_weights
    return model.state + records


def stored_bytes(model: ModelBytes, algorithm: AlgorithmSpec, workers: int, *, checkpoints: bool = True) -> int:
    """Return the most bytes that the states of a job take on the server's disk, besides the initial one.

    They are two states of ends of epochs and, where workers are independent, two snapshots: the newest and the next.
    Without ``checkpoints`` the only state of an end is the result, at whose time there is one snapshot.
    """
    snapshot = snapshot_bytes(model, algorithm, workers) if algorithm.topology_facts.flat else 0.0
    return round(2 * snapshot + 2 * model.state if checkpoints else snapshot + max(snapshot, model.state))


def _kept(part: ModelBytes, algorithm: AlgorithmSpec, workers: int) -> float:
    """Return the bytes that the algorithm makes a shard keep besides its state."""
    facts, replies = RULE_FACTS[algorithm.update_rule], workers * (algorithm.overlap + 1)
    backups = float(replies) if facts.backups else 0.0
    if backups and workers > FEW_WORKERS and not algorithm.encodes_replies:
        backups = replies / 2 + ANCHORS
    missing = max(0, 2 * part.weights - part.state) if facts.reserve else 0
    merged = 0 if algorithm.consistency_facts.independent or algorithm.consistency_facts.bounded else 1
    return missing + (facts.state + facts.worker_state * workers + backups + merged) * part.weights
