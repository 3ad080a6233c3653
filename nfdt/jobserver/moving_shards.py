"""Client of shards that are replaced while the job runs: a call that fails is repeated, also with their successors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nfdt.core.errors import ServerUnreachable
from nfdt.core.work.patience import Patience
from nfdt.jobserver.shard_clients import ShardClients, ShardSnapshot
from nfdt.model.program.state import State

_log = logging.getLogger(__name__)

ShardReply = TypeVar("ShardReply")
RETRY_S = 1.0  # time for successors, before a call that failed is repeated with the same shards


class MovingShards:
    """Client of the current shards of a job; a :class:`ShardClients`.

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
        """See :class:`ShardClients`."""
        self._written = None
        self._call(lambda shards: shards.flush())

    def set_learning_rate(self, value: float) -> None:
        """See :class:`ShardClients`."""
        self._rate = value
        self._call(lambda shards: shards.set_learning_rate(value))

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """See :class:`ShardClients`."""
        return self._call(lambda shards: shards.forget(worker, tasks))

    def statistics(self) -> list[Any]:
        """See :class:`ShardClients`."""
        return self._call(lambda shards: list(shards.statistics()))

    def read(self) -> State:
        """See :class:`ShardClients`."""
        return self._call(lambda shards: shards.read())

    def write(self, state: State) -> None:
        """See :class:`ShardClients`."""
        self._written = state if self._repeats_writes else None
        self._call(lambda shards: shards.write(state))

    def snapshot(self, copied: Callable[[], None]) -> ShardSnapshot:
        """See :class:`ShardClients`; not repeated, because it belongs to the shards that were asked."""
        return self._wait_for_other_than(None).snapshot(copied)
