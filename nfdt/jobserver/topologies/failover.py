"""Failover of an elastic ring's leader, the rank that is registered at this server, and the carrier of any failover.

For the coordinator the ring is one worker and one shard, whichever rank is the leader.
So a lost leader is no lost worker: calls to the shard wait for the next leader, which gets the last instruction again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.failover import Fail, FailoverMachine, Reach, Resume, Seek, Stalled, Start
from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.moving_shards import MovingShards
from nfdt.jobserver.outcome import PartLost
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.launch.ring import Ring

FAILOVER_S = 60.0  # time for a new leader in addition to the ring's own time limit
FAILOVER_POLL_S = 0.2  # interval of checks for successors


class Failover(ABC):
    """Carrier of a :class:`FailoverMachine`: a timer for each series of losses, which replaces lost positions.

    Only messages call it. Successors are called on a thread, which brings their answer as a message.

    Args:
        parts: Parts of the job.
        coordinator: Coordinator of the job.
        connect: Function that creates the client of the shards at their current addresses.

    Attributes:
        shards: Client of the current shards.
    """

    _machine: FailoverMachine
    shards: MovingShards

    def __init__(self, parts: JobParts, coordinator: Coordinator, connect: Callable[[], ShardClients]) -> None:
        self._parts, self._slots, self._mailbox = parts, parts.slots, parts.mailbox
        self._coordinator, self._connect = coordinator, connect

    @property
    def running(self) -> bool:
        """Whether parts are lost and not restored yet."""
        return self._machine.restoring

    def lose(self, lost: JobSlot, how: str) -> None:
        """Replace the process of a position."""
        lost.failing_over, lost.address = True, ""
        match self._machine.lost(lost.name, how):
            case Seek():
                self._mailbox.add_timer(self._look)
            case Fail(reason):
                self._mailbox.end(PartLost(reason))

    def close(self) -> None:
        """End the failover of the job."""
        self._machine.close()

    def _look(self) -> float | None:
        """Report to the state machine until it serves again, and do what it answers; a timer."""
        try:
            while self._machine.stage in ("placing", "starting"):
                self._mailbox.check()
                self._parts.job_log.retry()
                match self._machine.checked(self._missing()):
                    case Start(attempt):
                        self._mailbox.handle(partial(self._start, attempt))
                    case Reach(attempt):
                        self._mailbox.start(partial(self._reach, attempt), f"failover of {self._parts.job_id}")
                    case Stalled(missing, seconds):
                        self._parts.job_log.stalled(list(missing), seconds)
                    case Fail(reason):
                        raise JobFailed(reason)
                    case None:
                        break
        except Exception as error:  # the job waits for the successors
            self._give_up(error)
        return FAILOVER_POLL_S if self.running else None

    def _reach(self, attempt: int) -> None:
        """Connect to successors, and repeat what only the memory of the lost ones held; a slow call."""
        try:
            current, answered = self._connect(), True
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


class LeaderFailover(Failover):
    """Failover to the next leader of one job's ring, which takes the positions of the shard and the worker.

    Args:
        parts: Parts of the job.
        coordinator: Coordinator of the job.
        ring: The ring.
        connect: Function that creates the client of the shard at its current address.
        deadline_s: Time limit of a failover, in seconds.
    """

    def __init__(
        self,
        parts: JobParts,
        coordinator: Coordinator,
        ring: Ring,
        connect: Callable[[], ShardClients],
        deadline_s: float,
    ) -> None:
        too_late = (
            f"The rank that spoke for the ring is gone. Expected: another one within {deadline_s:.0f} s. "
            f"Received: none; see {ring.log}. Submit the job again."
        )
        super().__init__(parts, coordinator, connect)
        self._machine = FailoverMachine(parts.server.clock, deadline_s, too_late)
        self.shards = MovingShards(connect(), deadline_s, "rank of the ring", repeats_writes=True)
        self._ring = ring

    def _positions(self) -> list[JobSlot]:
        return [*self._slots.shards, *self._slots.living()]

    def _missing(self) -> Sequence[str]:
        shard, worker = self._positions()
        there = bool(shard.address)
        if self._machine.stage == "placing":
            there = shard.failing_over and worker.failing_over and self._slots.take_over(shard, worker)
        if not there and (failure := self._ring.failure):
            raise JobFailed(failure)
        return [] if there else ["the next leader"]

    def _start(self, attempt: int) -> None:
        self._slots.start_shard(self._positions()[0])

    def _resume(self, resume: Resume) -> None:
        worker = self._positions()[1]
        self._slots.start_worker(worker, 1)
        self._coordinator.resumed(worker.name, dict(worker.details))
