"""Failover of an elastic ring's leader, the rank that is registered at this server, and the thread of any failover.

For the coordinator the ring is one worker and one shard, whichever rank is the leader.
So a lost leader is no lost worker: calls to the shard wait for the next leader, which gets the last instruction again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.failover import Fail, FailoverMachine, Reach, Resume, Seek, Stalled, Start
from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.moving_shards import MovingShards
from nfdt.jobserver.outcome import PartLost, explained
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.context import TopologyContext
from nfdt.launch.ring import Ring

FAILOVER_S = 60.0  # time for a new leader in addition to the ring's own time limit
FAILOVER_POLL_S = 0.2  # interval of checks for successors


class Failover(ABC):
    """Carrier of a :class:`FailoverMachine`: a thread for each series of losses, which replaces lost positions.

    "Locked" in a docstring means that the caller holds ``context.changed``.

    Args:
        context: Parts of the job.
        coordinator: Coordinator of the job.
        connect: Function that creates the client of the shards at their current addresses.

    Attributes:
        shards: Client of the current shards.
    """

    _machine: FailoverMachine
    shards: MovingShards

    def __init__(self, context: TopologyContext, coordinator: Coordinator, connect: Callable[[], ShardClients]) -> None:
        self._context, self._slots, self._changed = context, context.slots, context.changed
        self._coordinator, self._connect = coordinator, connect

    @property
    def running(self) -> bool:
        """Whether parts are lost and not restored yet; locked."""
        return self._machine.restoring

    def lose(self, lost: JobSlot, how: str) -> None:
        """Replace the process of a position in the background; locked."""
        lost.failing_over, lost.address = True, ""
        match self._machine.lost(lost.name, how):
            case Seek():
                threading.Thread(target=self._run, name=f"failover of {self._context.job_id}", daemon=True).start()
            case Fail(reason):
                self._context.fail(PartLost(reason))

    def close(self) -> None:
        """End the failover of the job; locked."""
        self._machine.close()

    def _run(self) -> None:
        try:
            while self._proceed():
                pass
        except Exception as error:  # the job waits for this thread
            reason = self._reason(error)
            with self._changed:
                self._machine.close()
                self._context.fail(reason)
            self.shards.close()

    def _proceed(self) -> bool:
        """Report to the state machine, and do what it answers; return whether parts are still lost."""
        with self._changed:
            if not self.running:
                return False
            self._context.check()
            self._context.job_log.retry()
            effect = self._machine.checked(self._missing())
            match effect:
                case Start(attempt):
                    self._start(attempt)
                case Stalled(missing, seconds):
                    self._context.job_log.stalled(list(missing), seconds)
                case Fail(reason):
                    raise JobFailed(reason)
                case None:
                    self._changed.wait(FAILOVER_POLL_S)
        return not isinstance(effect, Reach) or self._connected(effect.attempt)

    def _connected(self, attempt: int) -> bool:
        """Connect to successors, and repeat what only the memory of the lost ones held; see :meth:`_proceed`."""
        current, answered = self._connect(), True
        with self._changed:
            fresh = self._coordinator.fresh
        try:
            self.shards.repeat(current, fresh=fresh)
            self.shards.replace(current)
        except ServerUnreachable:  # lost again: the end is about to be reported
            current.close()
            answered = False
        with self._changed:
            if (resume := self._machine.called(attempt, answered=answered)) is not None:
                self._resume(resume)
                self._changed.notify_all()
            return self.running  # before the lock is free: the next loss gets a thread of its own

    @abstractmethod
    def _missing(self) -> Sequence[str]:
        """Place lost positions, or look at those that start; return what is missing; locked."""

    @abstractmethod
    def _start(self, attempt: int) -> None:
        """Start the successors; locked."""

    @abstractmethod
    def _resume(self, resume: Resume) -> None:
        """Let the workers go on; locked."""

    @abstractmethod
    def _reason(self, error: Exception) -> BaseException:
        """Return the reason for the end of the job."""


class LeaderFailover(Failover):
    """Failover to the next leader of one job's ring, which takes the positions of the shard and the worker.

    Args:
        context: Parts of the job.
        coordinator: Coordinator of the job.
        ring: The ring.
        connect: Function that creates the client of the shard at its current address.
        deadline_s: Time limit of a failover, in seconds.
    """

    def __init__(
        self,
        context: TopologyContext,
        coordinator: Coordinator,
        ring: Ring,
        connect: Callable[[], ShardClients],
        deadline_s: float,
    ) -> None:
        too_late = (
            f"The rank that spoke for the ring is gone. Expected: another one within {deadline_s:.0f} s. "
            f"Received: none; see {ring.log}. Submit the job again."
        )
        super().__init__(context, coordinator, connect)
        self._machine = FailoverMachine(context.server.clock, deadline_s, too_late)
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

    def _reason(self, error: Exception) -> BaseException:
        return explained(self._ring, error)
