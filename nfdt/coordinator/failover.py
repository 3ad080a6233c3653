"""Failover of processes that hold the weights of a job, as a state machine: a ring's leader, or the shards.

::

    serving ──lost──> placing ──checked──> starting ──checked──> connecting ──called──> serving
                         ^──────────── lost, or called in vain ──────┘       close, too late ──> closed

Reports go in, what to do comes out. A report that does not fit the state has no effect: what it is about is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.core.clock import Clock


@dataclass(frozen=True)
class Seek:
    """Report what is missing from now on, until the machine serves again or is closed."""


@dataclass(frozen=True)
class Start:
    """Start the successors, as this attempt."""

    attempt: int


@dataclass(frozen=True)
class Reach:
    """Call the successors of this attempt, and report how it went."""

    attempt: int


@dataclass(frozen=True)
class Resume:
    """Let the workers go on.

    Attributes:
        seconds: Time since the loss.
        redone_samples: Number of samples that are trained again.
    """

    seconds: float
    redone_samples: int = 0


@dataclass(frozen=True)
class Stalled:
    """Announce for how many seconds these parts have been missing."""

    missing: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Fail:
    """Fail the job for this reason.

    Attributes:
        reason: The reason.
        memory: Whether parts were killed again and again, as where memory is short: another run would end likewise.
    """

    reason: str
    memory: bool = False


class FailoverMachine:
    """State machine that replaces lost parts of a job. See the module's docstring.

    Args:
        clock: Clock of the job.
        limit_s: Time limit of ``placing`` and of ``starting``, in seconds. The caller limits its calls itself.
        too_late: Reason of the failure after that time, in which ``{missing}`` stands for the missing parts.

    Attributes:
        stage: Current state.
        attempt: Number of starts of successors.
    """

    def __init__(self, clock: Clock, limit_s: float, too_late: str) -> None:
        self._clock, self._limit_s, self._too_late = clock, limit_s, too_late
        self.stage: Literal["serving", "placing", "starting", "connecting", "closed"] = "serving"
        self.attempt = 0
        self._lost_at = 0.0

    @property
    def restoring(self) -> bool:
        """Whether parts are lost and not restored yet."""
        return self.stage not in ("serving", "closed")

    def serves(self, attempt: int) -> bool:
        """Whether the parts that this attempt started still serve."""
        return self.stage == "serving" and self.attempt == attempt

    def close(self) -> None:
        """End the failover: the job ends, or goes on without."""
        self.stage = "closed"

    def lost(self, part: str, how: str, *, killed: bool = False) -> Seek | Fail | None:
        """Record that a part has lost its process, for the reason ``how``; ``killed``: the process was killed."""
        begins = self.stage == "serving"
        if begins:
            self._lost_at = self._clock.now()
        if begins or self.stage in ("starting", "connecting"):
            self._enter("placing")
        return Seek() if begins else None

    def checked(self, missing: Sequence[str]) -> Start | Reach | Stalled | Fail | None:
        """Record which parts have no place yet, or have not started yet."""
        if self.stage not in ("placing", "starting"):
            return None
        if missing:
            return self._wait(missing)
        if self.stage == "starting":
            self.stage = "connecting"
            return Reach(self.attempt)
        self.attempt += 1
        self._enter("starting")
        return Start(self.attempt)

    def called(self, attempt: int, *, answered: bool) -> Resume | None:
        """Record whether the successors of an attempt answer. If not, they are lost again."""
        if self.stage != "connecting" or attempt != self.attempt:
            return None
        if answered:
            self.stage = "serving"
            return Resume(self._clock.now() - self._lost_at)
        self._enter("placing")
        return None

    def _enter(self, stage: Literal["placing", "starting"]) -> None:
        now = self._clock.now()
        self.stage, self._until, self._stall = stage, now + self._limit_s, StallWatch(now, STALL_AFTER_S)

    def _wait(self, missing: Sequence[str]) -> Stalled | Fail | None:
        if (now := self._clock.now()) >= self._until:
            self.close()
            return Fail(self._too_late.replace("{missing}", ", ".join(missing)))
        seconds = self._stall.stalled_s(now)
        return None if seconds is None else Stalled(missing, seconds)
