"""Emulation of a worker's steps: how long each one lasts, and at which one the process is killed.

Real workers and Horovod ranks are given an :class:`EmulatedSteps`. They do not read ``emulate`` themselves, and neither
do simulated workers, whose machines say how long a step lasts. The emulated link is chosen in
:func:`nfdt.transport.stream.shard_connector`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

from nfdt.core.specs.job import JobSpec

logger = logging.getLogger(__name__)


class EmulatedSteps:
    """What ``emulate`` asks of the steps of one worker.

    Args:
        spec: The job.
        number: Number of the worker in the job.
        name: Name of the worker in the log.
        wait: Waits for a number of seconds, or less if the job ends.

    Attributes:
        active: Whether any step may be lengthened or be the last one; if not, no step has to be timed.
    """

    def __init__(self, spec: JobSpec, number: int, name: str, wait: Callable[[float], object] = time.sleep) -> None:
        self._spec, self._number, self._name, self._wait = spec, number, name, wait
        emulate = spec.cluster.emulate
        self._last_steps = emulate.last_steps(number)
        self.active = bool(emulate.slowdown or emulate.step_ms or emulate.fail)

    def finish(self, step: int, seconds: float, samples: int) -> None:
        """Finish a step: kill this process if it is scripted to be the last one, else wait as in :meth:`lengthen`.

        Args:
            step: Number of the step, counted from 1.
            seconds: Measured duration of the gradient.
            samples: Samples of the batch.
        """
        if step in self._last_steps:
            logger.warning("%s is killed at its step %d, as emulate.fail asks", self._name, step)
            os.kill(os.getpid(), signal.SIGKILL)  # without a chance to clean up, like a machine that fails
        self.lengthen(seconds, samples)

    def lengthen(self, seconds: float, samples: int) -> float:
        """Wait until a gradient that took ``seconds`` has lasted its emulated time; return that time."""
        lasting = self._spec.cluster.emulate.step_s(self._number, seconds, self._spec.batch_share(samples))
        if lasting > seconds:
            self._wait(lasting - seconds)
        return lasting
