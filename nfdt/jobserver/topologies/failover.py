"""Failover of the processes that hold a job's weights, and a client of the shards that survives it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.failover import Fail, FailoverMachine, Reach, Resume, Seek, Stalled, Start
from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.work.patience import Patience
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.outcome import PartLost
from nfdt.jobserver.shard_clients import ShardClients, ShardSnapshot
from nfdt.model.program.state import State

_log = logging.getLogger(__name__)

ShardReply = TypeVar("ShardReply")
RETRY_S = 1.0  # time for successors, before a call that failed is repeated with the same shards
FAILOVER_POLL_S = 0.2  # interval of checks for successors


class MovingShards:
    """Client of shards that are replaced while the job runs: a call that fails is repeated, also with their successors.

    It is a :class:`~nfdt.jobserver.shard_clients.ShardClients`.

    Args:
        current: Client of the first shards.
        deadline_s: Time limit for periods without an answer, in seconds.
        what: What does not answer after that time, for the error.
        repeats_writes: Whether successors lack what was written since the end of the last epoch.

    Attributes:
        closed: Whether the job has ended.
    """

    def __init__(self, current: ShardClients, deadline_s: float, what: str, repeats_writes: bool = False) -> None:
        self._current, self._deadline_s, self._what, self._repeats_writes = current, deadline_s, what, repeats_writes
        self._retired: list[ShardClients] = []
        self._changed = threading.Condition()
        self._rate: float | None = None  # None: that of the program
        self._written: State | None = None  # since the end of the last epoch
        self.closed = False

    def repeat(self, following: ShardClients, *, fresh: bool) -> None:
        """Repeat what successors may lack, before they replace the current shards.

        ``fresh``: no step of the epoch is trained yet.
        """
        if self._rate is not None:
            following.set_learning_rate(self._rate)
        if self._written is not None and fresh:
            following.write(self._written)

    def replace(self, current: ShardClients) -> None:
        """Set the client of the successors; calls to the shards before fail, and are repeated."""
        with self._changed:
            retired, self._current = self._current, current
            self._retired.append(retired)
            self._changed.notify_all()

    def close(self) -> None:
        """Fail running calls, and stop waiting for successors."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        for shards in (*self._retired, self._current):
            shards.close()

    def _call(self, call: Callable[[ShardClients], ShardReply]) -> ShardReply:
        patience, began = Patience(self._deadline_s, pause=lambda left_s: True), time.monotonic()
        current = self._wait_for_other_than(None)
        while True:
            try:
                return call(current)
            except ServerUnreachable as error:
                if not patience.failure(began):
                    raise self._silence() from None
                _log.info("%s Trying again.", error)
            current = self._wait_for_other_than(current)

    def _wait_for_other_than(self, tried: ShardClients | None) -> ShardClients:
        """Return the successors of shards that did not answer, or the same ones if there are no successors yet."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._current is not tried, RETRY_S)
            if self.closed:
                raise self._silence()
            return self._current

    def _silence(self) -> ServerUnreachable:
        return ServerUnreachable(f"No {self._what} answers (time limit: {self._deadline_s:.0f} s).")

    def flush(self) -> None:
        """Apply gradients that softsync still holds."""
        self._written = None  # the end of the epoch is stored, so successors have it
        self._call(lambda shards: shards.flush())

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate, also of successors."""
        self._rate = value
        self._call(lambda shards: shards.set_learning_rate(value))

    def keep(self, kept: bool) -> None:
        """Keep the present weights for workers that evaluate them later, or no more of those kept before."""
        self._call(lambda shards: shards.keep(kept))

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """Drop the backups of a lost worker and refuse its pushes; return those of its tasks that each has applied."""
        return self._call(lambda shards: shards.forget(worker, tasks))

    def statistics(self) -> list[Any]:
        """Return the counts of each shard, in order."""
        return self._call(lambda shards: list(shards.statistics()))

    def save(self, artifacts: ArtifactStore, rest: Rest, *, weights_only: bool = False) -> str:
        """Store the state of all shards, with the rest of a state; return the artifact."""
        return self._call(lambda shards: shards.save(artifacts, rest, weights_only=weights_only))

    def write(self, state: State) -> None:
        """Replace the weights, and the optimizer variables that the state has."""
        self._written = state if self._repeats_writes else None
        self._call(lambda shards: shards.write(state))

    def snapshot(self, copied: Callable[[], None], artifacts: ArtifactStore, rest: Rest) -> ShardSnapshot:
        """Store the state of the current shards; not repeated, because it belongs to the shards that were asked."""
        return self._wait_for_other_than(None).snapshot(copied, artifacts, rest)


class Failover(ABC):
    """Driver of a :class:`FailoverMachine`: a timer that replaces lost positions until the machine serves again.

    Only messages call it. Successors are called on a thread, which brings their answer as a message.

    Args:
        parts: Parts of the job.
        coordinator: Coordinator of the job.

    Attributes:
        shards: Client of the current shards.
    """

    _machine: FailoverMachine
    shards: MovingShards

    def __init__(self, parts: JobParts, coordinator: Coordinator) -> None:
        self._parts, self._slots, self._mailbox, self._coordinator = parts, parts.slots, parts.mailbox, coordinator

    @property
    def running(self) -> bool:
        """Whether parts are lost and not restored yet."""
        return self._machine.restoring

    def lose(self, lost: JobSlot, how: str, *, killed: bool = False) -> None:
        """Replace the process of a position; ``killed``: it was killed."""
        lost.failing_over, lost.address = True, ""
        match self._machine.lost(lost.name, how, killed=killed):
            case Seek():
                self._mailbox.add_timer(self._look)
            case Fail(reason, memory):
                self._mailbox.end(self._out_of_memory(reason) if memory else PartLost(reason))

    def _out_of_memory(self, reason: str) -> JobFailed:
        """Return the end of a job whose parts do not fit into memory."""
        return JobFailed(reason)

    def close(self) -> None:
        """End the failover of the job."""
        self._machine.close()

    def _look(self) -> float | None:
        """Report to the state machine until it serves again, and do what it answers; a timer."""
        job_id = self._parts.job_id
        try:
            while self._machine.stage in ("placing", "starting"):
                self._mailbox.check()
                self._parts.job_log.retry()
                match self._machine.checked(self._missing()):
                    case Start(attempt):
                        self._mailbox.handle(partial(self._start, attempt))
                    case Reach(attempt):
                        shards = self._parts.connect_shards()
                        self._mailbox.start(partial(self._reach, attempt, shards), f"failover of {job_id}")
                    case Stalled(missing, seconds):
                        self._parts.job_log.stalled(list(missing), seconds)
                    case Fail(reason):
                        raise JobFailed(reason)
                    case None:
                        break
        except Exception as error:  # the job waits for the successors
            self._give_up(error)
        return FAILOVER_POLL_S if self.running else None

    def _reach(self, attempt: int, current: ShardClients) -> None:
        """Call successors, and repeat what only the memory of the lost ones held; a slow call."""
        answered = True
        try:
            try:
                self.shards.repeat(current, fresh=self._mailbox.read(lambda: self._coordinator.fresh))
                self.shards.replace(current)
            except ServerUnreachable:  # lost again: the end is about to be reported
                current.close()
                answered = False
            self._mailbox.handle(lambda: self._called(attempt, answered=answered))
        except Exception as error:  # the job waits for this thread
            self._give_up(error)

    def _called(self, attempt: int, *, answered: bool) -> None:
        if (resume := self._machine.called(attempt, answered=answered)) is not None:
            self._resume(resume)

    def _give_up(self, error: Exception) -> None:
        self._mailbox.handle(self._machine.close)
        self._mailbox.end(self._reason(error))
        self.shards.close()

    @abstractmethod
    def _missing(self) -> Sequence[str]:
        """Place lost positions, or look at those that start; return what is missing."""

    @abstractmethod
    def _start(self, attempt: int) -> None:
        """Start the successors."""

    @abstractmethod
    def _resume(self, resume: Resume) -> None:
        """Let the workers go on."""

    def _reason(self, error: Exception) -> BaseException:
        """Return the reason for the end of the job."""
        return error
