"""Measured steps of the workers of one job, and the batch sizes that follow from them. Time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nfdt.coordinator.online_planner import LEAST_STEPS
from nfdt.coordinator.progress import Throttle
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import TaskTime
from nfdt.schedulers.batch_policies import LocalSizes, find_batch_policy
from nfdt.schedulers.local_steps import LocalStepSizes
from nfdt.schedulers.tasks import Task
from nfdt.schedulers.throughput import Speeds, StepTime

REPORT_EVERY_S = 1.0
CHANGED = 0.1  # a speed that changed by a smaller fraction is not reported again


def batch_sizes(spec: JobSpec) -> LocalSizes | None:
    """Return the local batch sizes of a job; None if every batch has the size that ``fit`` gives."""
    algorithm = spec.algorithm
    if algorithm.exchange_facts.local and spec.train.planned is not None:
        steps = None if algorithm.local_steps == "auto" else algorithm.local_steps
        return LocalStepSizes(*((spec.fit.batch_size, steps) if spec.train.sized else (1, steps, spec.fit.batch_size)))
    if spec.train.kind != "arrays":
        return None
    return find_batch_policy(spec.algorithm.batch).sizes(spec.fit.batch_size, spec.algorithm)


class SpeedTracker:
    """Measured steps of each worker, their reports, and the batch sizes of a job that follow from them.

    Args:
        spec: The job.
        sizes: Batch sizes that another part of the job decides; None: the sizes of the job's batch policy.

    Attributes:
        sizes: Batch sizes that differ between workers, if the job has them.
        speeds: Step times of the workers.
        described: Last description of each worker, including lost ones.
        throttle: Limits how often the speeds are reported.
    """

    def __init__(self, spec: JobSpec, sizes: LocalSizes | None = None) -> None:
        self.sizes = sizes or batch_sizes(spec)
        self.speeds = Speeds()
        self.described: dict[str, dict[str, Any]] = {}
        self._reference = spec.fit.batch_size
        self._row_samples = 1 if spec.train.sized else spec.fit.batch_size
        self.throttle = Throttle(REPORT_EVERY_S)
        self._reported: dict[str, dict[str, Any]] = {}

    def joined(self, worker: str) -> None:
        """Add a worker."""
        if self.sizes:
            self.sizes.joined(worker)

    def left(self, worker: str) -> None:
        """Remove a lost worker; its last description stays."""
        self.speeds.remove(worker)
        if self.sizes:
            self.sizes.left(worker)

    def stepped(self, worker: str, samples: int, time: TaskTime) -> None:
        """Record the time of a worker's step."""
        self.speeds.measured(worker, samples, time.compute_s + time.exchange_s, time.exchange_s)
        if self.sizes:
            self.sizes.trained(worker, samples, time.compute_s, time.push_s)
            self.sizes.stepped(worker, self.speeds)

    def look(self, now: float) -> None:
        """Size the next tasks as of this time."""
        if self.sizes:
            self.sizes.look(now)

    def leased(self, worker: str, tasks: Sequence[Task], begins: float) -> None:
        """Record the tasks that a worker trains from a time on."""
        if self.sizes:
            self.sizes.leased(worker, sum(task.stop - task.start for task in tasks), begins)

    def are_measured(self, workers: Sequence[str]) -> bool:
        """Whether each worker has made enough steps for a decision."""
        return bool(workers) and all(self.speeds.of(worker).steps >= LEAST_STEPS for worker in workers)

    def size_of(self, worker: str) -> int:
        """Return the number of samples of the worker's next step."""
        return self.sizes.of(worker) * self._row_samples if self.sizes else self._reference

    def step_s(self, worker: str, samples: int | None = None) -> float | None:
        """Return the expected seconds of a worker's step, None: of its next one; None before they are known."""
        line = self.speeds.of(worker).step_time
        return None if line is None else line.seconds(self.size_of(worker) if samples is None else samples)

    def step_times(self, workers: Sequence[str]) -> dict[str, tuple[StepTime, float]]:
        """Return the step time of each measured worker, and the seconds of its step that are not computation."""
        measured = {worker: self.speeds.of(worker) for worker in workers}
        return {worker: (line, each.exchange_s) for worker, each in measured.items() if (line := each.step_time)}

    def describe(self, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Describe the speed of each of these workers that is measured, or was earlier."""
        for worker, (line, exchange_s) in self.step_times(workers).items():
            size = self.size_of(worker)
            self.described[worker] = {
                "samples_per_s": round(line.samples_per_s(size), 3),
                "step_s": round(line.seconds(size), 6),
                "step_exchange_s": round(exchange_s, 6),
                "batch_size": size,
            }
        return {worker: self.described[worker] for worker in workers if worker in self.described}

    def report(self, workers: Sequence[str]) -> dict[str, dict[str, Any]] | None:
        """Return the speeds of these workers if one of them has changed since the last report, else None."""
        described = self.describe(workers)
        if not any(self._has_changed(worker, entry) for worker, entry in described.items()):
            return None
        self._reported = described
        return described

    def _has_changed(self, worker: str, entry: dict[str, Any]) -> bool:
        last = self._reported.get(worker)
        if last is None or last["batch_size"] != entry["batch_size"]:
            return True
        return bool(abs(entry["samples_per_s"] - last["samples_per_s"]) > CHANGED * last["samples_per_s"])

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue with other batch sizes; None: every batch has the size that ``fit`` gives."""
        self.sizes, self._reference = sizes, spec.fit.batch_size
