"""Amount of work of an epoch, and its duration on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.planning.calibration import MeasuredEpochs, MeasuredWorker, step_of
from nfdt.schedulers import StepTime


@dataclass(frozen=True)
class Profile:
    """Measured duration of a few steps of a script's model.

    Attributes:
        step: Seconds of a gradient as a function of the samples in its batch.
        apply_s: Seconds that a shard with the whole model takes for a push with its reply.
        plain: Epochs of Keras' own ``fit``, without NFDT; None: not measured.
        worker: Epochs of one worker with one shard; None: not measured.
    """

    step: StepTime
    apply_s: float
    plain: MeasuredEpochs | None = None
    worker: MeasuredWorker | None = None

    def worker_step(self, batch_size: int) -> StepTime:
        """Return the seconds of a gradient in a worker, which are those measured alone if no worker was measured."""
        return self.step if self.worker is None else step_of(self.worker, self.step, batch_size)


@dataclass(frozen=True)
class ProfiledWork:
    """Size of a ``fit``, as needed for a prediction.

    Attributes:
        batch_size: Batch size of one worker.
        samples: Number of samples of an epoch.
        weights: Elements of the model; 0 if unknown.
        profile: Measured durations on this machine, or None.
    """

    batch_size: int
    samples: int
    weights: int
    profile: Profile | None = None
