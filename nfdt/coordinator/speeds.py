"""The measured speeds of a job's workers, and the batch sizes that follow from them. Time is passed in."""

from __future__ import annotations

from collections.abc import Sequence

from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import TaskTime
from nfdt.schedulers import Speeds, StepTime
from nfdt.schedulers.batch_policies import LocalSizes, find_batch_policy


def batch_sizes(spec: JobSpec) -> LocalSizes | None:
    """Return the local batch sizes of a job; None if every batch has the size that ``fit`` gives."""
    if spec.train.kind != "arrays":
        return None
    return find_batch_policy(spec.algorithm.batch).sizes(spec.fit.batch_size, spec.algorithm)


class SpeedTracker:
    """Measured steps of each worker, and the batch sizes of a job that follow from them.

    Args:
        spec: The job.
        sizes: Batch sizes that another part of the job decides; None: the sizes of the job's batch policy.

    Attributes:
        sizes: Batch sizes that differ between workers, if the job has them.
        speeds: Step times of the workers.
    """

    def __init__(self, spec: JobSpec, sizes: LocalSizes | None = None) -> None:
        self.sizes = sizes or batch_sizes(spec)
        self.speeds = Speeds()
        self._reference = spec.fit.batch_size

    def joined(self, worker: str) -> None:
        """Add a worker."""
        if self.sizes:
            self.sizes.joined(worker)

    def left(self, worker: str) -> None:
        """Forget a worker."""
        self.speeds.forget(worker)
        if self.sizes:
            self.sizes.left(worker)

    def stepped(self, worker: str, samples: int, time: TaskTime) -> None:
        """Record the time of a worker's step."""
        self.speeds.measured(worker, samples, time.compute_s + time.exchange_s, time.exchange_s)
        if self.sizes:
            self.sizes.stepped(worker, self.speeds)

    def size_of(self, worker: str) -> int:
        """Return the number of samples of the worker's next step."""
        return self.sizes.of(worker) if self.sizes else self._reference

    def step_times(self, workers: Sequence[str]) -> dict[str, tuple[StepTime, float]]:
        """Return the step time of each measured worker, and the seconds of its step that are not computation."""
        return {w: (line, self.speeds.exchange_s(w)) for w in workers if (line := self.speeds.of(w))}

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue with other batch sizes; None: every batch has the size that ``fit`` gives."""
        self.sizes, self._reference = sizes, spec.fit.batch_size
