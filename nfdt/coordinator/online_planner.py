"""The plan of a job, chosen from the measured speeds of its workers while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nfdt.core.specs.job import JobSpec
from nfdt.planning.cost_model import Cluster, PlanChoice, PlannedPreset, WorkerCost, choose, flat_presets, predict
from nfdt.schedulers.grouping import Groups, divide, evenly
from nfdt.schedulers.ring_network import NETWORK, RingLink, RingNetwork
from nfdt.schedulers.throughput import StepTime

LEAST_STEPS = 10  # measured steps of every worker before the first decision
WORLDS_S = 10.0  # seconds to start the communicators of groups

MeasuredSteps = Mapping[str, tuple[StepTime, float]]
"""Step time of each worker with the visible part of its exchange, and that part alone, in seconds."""


@dataclass(frozen=True)
class ShardLoad:
    """Load that a push puts on the busiest shard.

    Attributes:
        busy_s: Seconds that it kept the shard busy.
        wait_s: Seconds that it waited for the pushes of others.
        weights: Number of weights on all shards; 0: unknown.
    """

    busy_s: float
    wait_s: float
    weights: int = 0

    @classmethod
    def of(cls, statistics: Sequence[Mapping[str, Any]]) -> ShardLoad:
        """Return the load from the counters of all shards since they began; all zero before the first push."""
        loads = [(s["busy_s"] / s["pushes"], s["wait_s"] / s["pushes"]) for s in statistics if s.get("pushes")]
        busy_s, wait_s = max(loads, default=(0.0, 0.0))
        return cls(busy_s, wait_s, sum(int(s.get("size", 0)) for s in statistics))


def follows_a_plan(spec: JobSpec) -> bool:
    """Whether a part of the preset is chosen during training; this requires independent workers."""
    algorithm = spec.algorithm
    independent = algorithm.topology_facts.flat and algorithm.consistency_facts.independent
    return algorithm.plan != "nothing" and independent


class OnlinePlanner:
    """Online choice of a preset: once every worker is measured, then whenever another one is clearly better.

    Args:
        local_batch: Reference batch of one worker, in samples.
        overlap: Maximum overlap that may be chosen.
        batch: The job's batch policy.

    Attributes:
        preset: Current preset of the job.
        choice: The last decision; None before the first.
    """

    def __init__(self, local_batch: int, overlap: int, batch: str = "dbs") -> None:
        self.preset = PlannedPreset("free", batch, 0)
        self.choice: PlanChoice | None = None
        self._local_batch = local_batch
        self._flat = flat_presets(batch, overlap)
        self._exchange: dict[str, float] = {}

    def look(self, steps: MeasuredSteps) -> PlanChoice | None:
        """Return a new decision: the first one, or another preset of flat workers; None if nothing changes."""
        current = self.preset if self.choice else None
        choice = choose(self._cluster(steps), self._flat, current=current)
        if self.choice is not None and choice.preset == self.preset:
            return None
        self.choice, self.preset = choice, choice.preset
        return choice

    def look_at_groups(
        self, steps: MeasuredSteps, load: ShardLoad, remaining_s: float, machines: Mapping[str, str] | None = None
    ) -> PlanChoice | None:
        """Return groups that save more seconds than their communicators take to start; None: the workers stay flat.

        An allreduce moves as many bytes as a push with its reply: its estimate is that time without the shard's step.
        On one machine of several it is that of a local ring.

        Args:
            steps: Step times of all workers.
            load: Load of the busiest shard.
            remaining_s: Estimated remaining seconds of training.
            machines: Name of each worker's machine, where it is known.
        """
        cluster = self._cluster(steps, load)
        network = _network([(machines or {}).get(name, "") for name in steps], cluster.allreduce_s, load)
        cluster = replace(cluster, network=network)
        seconds = [worker.step.seconds(self._local_batch) for worker in cluster.workers]
        groupings: dict[Groups, None] = {}  # without duplicates, in order
        for count in range(1, len(seconds)):
            found = divide(seconds, count, network), evenly(seconds, count), evenly(seconds, count, network)
            groupings |= dict.fromkeys(found)
        presets = [PlannedPreset("free", self.preset.batch, 0, groups) for groups in groupings]
        choice = choose(cluster, [*self._flat, *presets], current=self.preset)
        if not choice.preset.groups:
            return None
        saved = 1 - predict(self.preset, cluster).progress_per_s / choice.prediction.progress_per_s
        return choice if saved * remaining_s > WORLDS_S else None

    def _cluster(self, steps: MeasuredSteps, load: ShardLoad | None = None) -> Cluster:
        workers = [self._cost(name, *times) for name, times in steps.items()]
        if load is None:
            return Cluster(tuple(workers), self._local_batch)
        workers = [replace(worker, exchange_s=max(load.busy_s, worker.exchange_s - load.wait_s)) for worker in workers]
        allreduce_s = max(worker.exchange_s for worker in workers) - load.busy_s
        return Cluster(tuple(workers), self._local_batch, load.busy_s, allreduce_s)

    def _cost(self, name: str, step: StepTime, exchange_s: float) -> WorkerCost:
        """Return a worker's cost. Its exchange is measurable only while none is hidden; later the last value counts."""
        if self.preset.overlap == 0 or exchange_s > self._exchange.get(name, 0.0):
            self._exchange[name] = exchange_s
        whole = step.seconds(self._local_batch)
        computing = max(0.05, 1 - exchange_s / whole)
        return WorkerCost(name, step.scaled(computing), self._exchange[name])


def _network(machines: Sequence[str], allreduce_s: float, load: ShardLoad) -> RingNetwork:
    """Return the network of these workers, with the link between machines on which an allreduce takes so long."""
    size = 4 * load.weights
    between = RingLink(0.0, allreduce_s / (2 * size)) if size else NETWORK
    return RingNetwork(tuple(machines), size, between=between)


def plan_event(choice: PlanChoice) -> dict[str, Any]:
    """Return a decision as the data of an event."""
    preset = choice.preset
    return {
        "row": {"topology": preset.topology, "batch": preset.batch, "overlap": preset.overlap},
        "samples_per_s": round(choice.prediction.samples_per_s, 3),
        "reason": choice.reason,
    }
