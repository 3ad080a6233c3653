"""The state of one shard: weights and their version, backups of each worker; pushes are applied at most once.

A push takes its place in the order of versions under the shard's lock; its engine may do the work after that, see
:mod:`nfdt.shard.loop_engine`, and everything else waits for that work. The staleness of a push is the current version
minus the version of the weights that its gradient was computed on: those of the newest reply, or of an older one if
pushes overlap. The store's mode determines how pushes become updates; see :mod:`nfdt.shard.modes`.

A reply holds all weights, or a delta to the weights that the worker holds; see :mod:`nfdt.shard.messages`.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.core.sharding.records import RecordTree
from nfdt.core.work.spans import APPLY, LOCK_WAIT, SpanRing, track_of
from nfdt.shard.backups import Backup, BackupStore
from nfdt.shard.buffers import aligned_buffer, length_of
from nfdt.shard.engine import Engine, EngineReply
from nfdt.shard.held_state import HeldState, StateHolder
from nfdt.shard.messages import DeltaRequest, Gradient, Reply, Vector
from nfdt.shard.modes import AsynchronousMode, ModeFactory
from nfdt.transport.base import WeightDelta

Starter = Callable[[Callable[[], None]], None]
"""Function that runs another one, in another thread as a rule, and logs its errors."""

PULL_TIMEOUT_S = 60.0
EXACT_STALENESS = 64
LATENCY_BOUNDS_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def staleness_bin(staleness: int) -> int:
    """Return the histogram bin: exact below ``EXACT_STALENESS``, then the next lower power of two."""
    return staleness if staleness < EXACT_STALENESS else 1 << (staleness.bit_length() - 1)


@dataclass
class PushCounts:
    """Counts of one worker's pushes."""

    pushes: int = 0
    duplicates: int = 0
    dropped: int = 0
    staleness: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; bins as text, ascending."""
        return {**vars(self), "staleness": {str(key): count for key, count in sorted(self.staleness.items())}}


@dataclass
class ShardStatistics:
    """Counts per worker; their size does not depend on the number of pushes. A worker that left keeps its counts."""

    workers: dict[str, PushCounts] = field(default_factory=lambda: defaultdict(PushCounts))
    busy_s: float = 0.0
    wait_s: float = 0.0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))

    def took(self, wait_s: float, busy_s: float) -> None:
        """Add the time that a push waited for other pushes, and the time that it kept the shard busy."""
        self.wait_s += wait_s
        self.busy_s += busy_s
        self.latencies[bisect_left(LATENCY_BOUNDS_S, wait_s + busy_s)] += 1

    def count(self, worker: str, staleness: int, applied: bool) -> None:
        """Count a push; an unapplied push was not finite."""
        found = self.workers[worker]
        found.pushes += 1
        found.dropped += not applied
        bin_ = staleness_bin(staleness)
        found.staleness[bin_] = found.staleness.get(bin_, 0) + 1

    def count_duplicate(self, worker: str) -> None:
        """Count a repeated push."""
        self.workers[worker].duplicates += 1

    def to_json(self) -> dict[str, Any]:
        """Return totals, and under ``workers`` the same counts per worker."""
        counts = {name: found.to_json() for name, found in self.workers.items()}
        totals = {key: sum(c[key] for c in counts.values()) for key in ("pushes", "duplicates", "dropped")}
        times = {"busy_s": self.busy_s, "wait_s": self.wait_s, "latency_s": self._latency()}
        return {**totals, **times, "workers": counts}

    def _latency(self) -> dict[str, Any]:
        """Return the histogram of the pushes' times: ``counts`` has one bin more, above the last bound."""
        return {"bounds_s": LATENCY_BOUNDS_S, "counts": self.latencies, "sum_s": self.busy_s + self.wait_s}


class ShardStore(StateHolder):
    """Thread-safe store of one shard.

    Args:
        engine: Weights, optimizer and rule; used only under the store's lock.
        mode: Makes the mode, which turns pushes into updates.
        overlap: Number of pushes of a worker that may be unanswered while it sends another one.
        backup_format: Name of the format of backups.
        spans: Takes the times of pushes, a track for each worker; None: they are dropped.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        mode: ModeFactory = AsynchronousMode,
        overlap: int = 0,
        backup_format: str = "exact",
        spans: SpanRing | None = None,
    ) -> None:
        self.overlap = overlap
        self._engine = engine
        self._changed = threading.Condition()
        self._backups = BackupStore(engine, backup_format, overlap + 1)
        self._mode = mode(engine, self._backups, lambda: self._changed.notify_all())
        self._statistics = ShardStatistics()
        self._spans = spans or SpanRing()

    @property
    def lock(self) -> threading.Condition:
        """Lock of the store, reentrant; each new version notifies those that wait for it."""
        return self._changed

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._engine.size

    @property
    def reply_size(self) -> int:
        """Number of elements of a reply with all weights."""
        return self.size

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._mode.version

    @property
    def closed_round(self) -> int:
        """Newest synchronous round that is closed; 0 before the first."""
        return self._mode.closed_round

    def pull(
        self,
        worker: str,
        *,
        sequence: int = 0,
        min_version: int = 0,
        timeout_s: float = PULL_TIMEOUT_S,
        delta: DeltaRequest | None = None,
    ) -> Reply:
        """Return the current weights; they become the worker's newest backup, or its only one for ``sequence`` 0.

        If the request for a delta is granted, a delta is returned, and the backup is the sum of base and delta.

        Raises:
            ProtocolError: the shard did not reach ``min_version`` within ``timeout_s``.
        """
        with self._changed:
            self._backups.check(worker)
            if not self._changed.wait_for(lambda: self.version >= min_version, timeout_s):
                raise ProtocolError(
                    f"Pull by {worker}: expected version {min_version} within {timeout_s:g} s. "
                    f"Received: version {self.version}; a push is missing."
                )
            base = self._backups.base_of(worker, sequence, delta)
            reply = self._repeat_or_send(worker, sequence)
            backup = self._backups.get(worker, sequence)
        return self._with_delta(worker, sequence, reply, delta, base, backup)

    def lookup(self, worker: str, payload: npt.NDArray[np.uint8], computed_on: int) -> Reply:
        """Raise ProtocolError: the job has no tables."""
        raise ProtocolError(f"Lookup by {worker}: expected a job with tables. Received: one without.")

    def push(
        self,
        worker: str,
        gradient: Gradient,
        *,
        want_weights: bool = True,
        delta: DeltaRequest | None = None,
        drop: bool = False,
        start: Starter | None = None,
    ) -> Reply:
        """Apply a gradient at most once, and return weights for the worker; see :meth:`pull`.

        With ``drop`` the push is counted like one with a non-finite gradient, and its gradient is not applied.
        With ``start`` an update of several parts may run in another thread: the reply then says when each of its parts
        is complete, and the gradient is borrowed until the update has ended.

        Raises:
            ShapeMismatch: the gradient has another size.
            ProtocolError: the worker never pulled, or has left; parts of a round contradict each other, or the mode
                does not accept such pushes.
        """
        self._check(worker, gradient)
        length = gradient.length
        if length is None:
            length = length_of(gradient.values)  # outside the lock, so that other workers do not wait
        usable = math.isfinite(length) and not drop
        asked_at = time.perf_counter()
        with self._changed:
            began_at = time.perf_counter()
            self._backups.check(worker)
            base = self._backups.base_of(worker, gradient.sequence, delta) if delta else None
            reply, finish = self._push(worker, gradient, length, usable, want_weights)
            backup = self._backups.get(worker, gradient.sequence) if base else None

        def complete() -> None:
            if finish is not None:
                finish()  # without the lock: other pushes work on other stripes at the same time
            with self._changed:
                ended_at, version = time.perf_counter(), self.version
                self._statistics.took(began_at - asked_at, ended_at - began_at)
            track = track_of(worker)
            self._spans.add(LOCK_WAIT, asked_at, began_at, track=track)
            self._spans.add(APPLY, began_at, ended_at, version, track)

        if start is not None and reply.parts is not None and base is None:
            start(complete)
            return reply
        complete()
        reply = replace(reply, parts=None)
        return self._with_delta(worker, gradient.sequence, reply, delta, base, backup) if base else reply

    def flush(self) -> int:
        """Apply the gradients that wait for others; return the version."""
        with self._changed:
            self._mode.flush()
            return self.version

    def forget(self, worker: str, tasks: Iterable[int] = ()) -> list[int]:
        """Free the record of a worker that has left, and refuse its requests; return those tasks that are applied."""
        with self._changed:
            self._backups.forget(worker)
            return self._backups.applied_of(tasks)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate from the next update on."""
        with self._changed:
            self._engine.set_learning_rate(value)

    def statistics(self) -> dict[str, Any]:
        """Return counts of this shard and per worker, ready for JSON."""
        with self._changed:
            rate = self._engine.learning_rate
            return {"version": self.version, "size": self.size, "learning_rate": rate, **self._statistics.to_json()}

    def hold(self, *, records: bool = False, weights_only: bool = False) -> HeldState:
        """Return the state at one moment, to be read and then released; with ``records`` a store continues from it.

        See :meth:`restore`.
        """
        with self._changed:
            held = self._engine.hold(weights_only=weights_only)
            if not records:
                return replace(held, records={})
            others = {
                "version": self.version,
                **held.records,
                "mode": self._mode.records(),
                # Parts of a round have no sequence numbers; an interrupted round is pushed again as a whole.
                **({} if self._mode.in_rounds else self._backups.records()),
            }
            return replace(held, records=others)

    def restore(self, records: RecordTree) -> None:
        """Continue from the records of a snapshot, in a new store with the weights and variables of that snapshot.

        Workers pull before they push, and their sequence numbers start again.

        Raises:
            ShapeMismatch: the records belong to another program or rule.
        """
        with self._changed:
            self._engine.restore(records)
            self._mode.version = int(records["version"])
            self._mode.restore(records.get("mode", {}))
            self._backups.restore(records)

    def write(self, weights: Vector, optimizer: dict[int, npt.NDArray[Any]]) -> int:
        """Replace the weights and, if given, the optimizer variables: a new version; waiting gradients are dropped.

        Raises:
            ShapeMismatch: the weights have another size.
        """
        if weights.shape != (self.size,):
            raise ShapeMismatch(f"Write: expected {self.size} weights. Received: shape {weights.shape}.")
        with self._changed:
            self._mode.discard()
            self._engine.write(weights, optimizer)
            self._backups.resync()  # deltas to the weights of before would be coarse
            self._mode.advance()
            return self.version

    def _check(self, worker: str, gradient: Gradient) -> None:
        if gradient.values.shape != (self.size,) or gradient.values.dtype != np.float32:
            raise ShapeMismatch(
                f"Push from worker {worker}: expected {self.size} float32 elements. Received: shape "
                f"{gradient.values.shape}, {gradient.values.dtype}. The worker runs another model; restart it."
            )
        if (gradient.round > 0) != self._mode.in_rounds:
            expected = "a part of a round" if self._mode.in_rounds else "an asynchronous one, as the job has no rounds"
            raise ProtocolError(
                f"Push from worker {worker}: expected {expected}. Received: part {gradient.part} of {gradient.parts}, "
                f"round {gradient.round}."
            )

    def _with_delta(
        self,
        worker: str,
        sequence: int,
        reply: Reply,
        request: DeltaRequest | None,
        base: Backup | None,
        backup: Backup | None,
    ) -> Reply:
        """Return the reply with a delta instead of its weights, if there is a base for it.

        Encoding happens outside the lock, so that other workers do not wait. Meanwhile the backup is that of the full
        weights; if the same request on another stream is answered with them, this one is, too.
        """
        if request is None or base is None or backup is None or reply.weights is None:
            return reply
        codec = request.codec
        payload, reached = np.empty(codec.encoded_bytes(self.size), np.uint8), aligned_buffer(self.size)
        if not codec.encode_difference(self._engine.array(base.weights), reply.weights, payload, reached):
            return reply  # a difference that is not finite cannot be sent
        weights = self._engine.tensor(reached)
        with self._changed:
            exchanged = self._backups.exchange(worker, sequence, backup, weights)
        delta = WeightDelta(codec, payload, request.base)
        return replace(reply, weights=None, delta=delta) if exchanged else reply

    # -- under the lock

    def _push(
        self, worker: str, gradient: Gradient, length: float, usable: bool, want_weights: bool
    ) -> tuple[Reply, Callable[[], None] | None]:
        """Return the reply, and what completes it without the lock."""
        outcome = self._mode.apply(worker, gradient, length, usable)
        if outcome is None:
            self._engine.wait_for_steps()  # the first reply may be repeated, and its step may still be working on it
            self._statistics.count_duplicate(worker)
            if not want_weights:
                return Reply(self.version, applied=False), None
            return self._repeat_or_send(worker, gradient.sequence, applied=False), None
        try:
            self._statistics.count(worker, outcome.staleness, outcome.applied)
            if not want_weights:
                return Reply(self.version, None, outcome.staleness, outcome.applied), outcome.finish
            reply = self._send(worker, gradient.sequence, outcome.reply(), outcome.staleness, outcome.applied)
            return reply, outcome.finish
        except BaseException:
            if outcome.finish is not None:
                outcome.finish()  # later pushes wait for it
            raise

    def _repeat_or_send(self, worker: str, sequence: int, *, applied: bool = True) -> Reply:
        """Repeat the first reply to a request if its backup is still kept, as the worker may hold these weights.

        Otherwise send the current weights.
        """
        backup = self._backups.get(worker, sequence)
        if backup is None or backup.weights is None:
            staleness = backup.staleness if backup else 0
            return self._send(worker, sequence, EngineReply(self._mode.snapshot()), staleness, applied)
        self._backups.confirm(worker, sequence, backup)
        return Reply(backup.version, self._engine.array(backup.weights), backup.staleness, applied)

    def _send(self, worker: str, sequence: int, reply: EngineReply, staleness: int, applied: bool) -> Reply:
        """Keep the backup of a reply and return it."""
        self._backups.add(worker, sequence, reply, self.version, staleness)
        return Reply(self.version, self._engine.array(reply.weights), staleness, applied, parts=reply.parts)
