"""One shard's memory: weights and their version, what each worker holds, and pushes applied at most once.

A push is atomic under the shard's lock. Staleness of a push is the version now minus the version of the weights its
gradient was computed on: those of the newest answer, or of an older one where pushes overlap. Three ways in:

- asynchronous (``round == 0``): corrected and applied on arrival;
- softsync (``merge_count > 1``): corrected on arrival, applied when ``merge_count`` have come;
- rounds (``round > 0``): summed in the order of their parts, applied when the last one has come.

Weights go out as they are, or as a difference to what the worker holds; see :mod:`nfdt.shard.delta_reply`.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.shard.backup_formats import Kind, Recorder
from nfdt.shard.backups import Backup, Backups, WorkerRecord, known
from nfdt.shard.delta_reply import difference_to
from nfdt.shard.engine import Engine, Sent, Stepped
from nfdt.shard.merge import Merge
from nfdt.shard.messages import Gradient, Reply, Vector, Wish
from nfdt.shard.rounds import Round
from nfdt.shard.statistics import ShardStatistics
from nfdt.shard.tensors import length_of

PULL_TIMEOUT_S = 60.0


class ShardStore:
    """Thread-safe store of one shard.

    Args:
        engine: Weights, optimizer and rule; used under the store's lock only.
        merge_count: How many arriving gradients make one update (softsync); 1 applies each.
        overlap: How many pushes of a worker may be unanswered while it sends another one.
        records: What is kept of the weights that workers hold.
    """

    def __init__(self, engine: Engine, *, merge_count: int = 1, overlap: int = 0, records: Kind = "exact") -> None:
        self.overlap = overlap
        self._engine = engine
        self._recorder = Recorder(records, engine)
        self._changed = threading.Condition()
        self._workers: dict[str, WorkerRecord] = {}
        self._statistics = ShardStatistics()
        self._version, self._closed_round = 0, 0
        self._shared: Any = None
        self._merge = Merge(engine, merge_count)
        self._round: Round | None = None
        self._round_rule: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._engine.size

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._version

    @property
    def closed_round(self) -> int:
        """The newest synchronous round that is over; 0 before the first is."""
        return self._closed_round

    def pull(
        self,
        worker: str,
        *,
        sequence: int = 0,
        min_version: int = 0,
        timeout_s: float = PULL_TIMEOUT_S,
        wish: Wish | None = None,
    ) -> Reply:
        """The weights as they are; they become the worker's newest backup, called ``sequence``, or its only one for 0.

        Where ``wish`` is granted, a difference comes instead, and what it makes of what the worker holds is the backup.

        Raises:
            ProtocolError: the shard did not reach ``min_version`` within ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._version >= min_version, timeout_s):
                raise ProtocolError(
                    f"Pull by {worker}: expected version {min_version} within {timeout_s:g} s. "
                    f"Received: version {self._version}; a push is missing."
                )
            base = self._base(worker, sequence, wish)
            reply = self._again(worker, sequence) or self._send(worker, sequence, Sent(self._snapshot()))
            sent = self._sent(worker, sequence)
        return self._reduced(worker, sequence, reply, wish, base, sent)

    def push(self, worker: str, gradient: Gradient, *, want_weights: bool = True, wish: Wish | None = None) -> Reply:
        """Apply a gradient at most once, and answer with what the worker shall hold next; see :meth:`pull`.

        Raises:
            ShapeMismatch: the gradient has another size.
            ProtocolError: the worker never pulled, or parts of a round contradict each other.
        """
        if gradient.values.shape != (self.size,) or gradient.values.dtype != np.float32:
            raise ShapeMismatch(
                f"Push from worker {worker}: expected {self.size} float32 elements. Received: shape "
                f"{gradient.values.shape}, {gradient.values.dtype}. The worker runs another model; restart it."
            )
        length = length_of(gradient.values)  # not under the lock, which the other workers wait for
        asked_at = time.perf_counter()
        with self._changed:
            began_at = time.perf_counter()
            base = self._base(worker, gradient.sequence, wish)
            push = self._push_part if gradient.round else self._push_alone
            reply = push(worker, gradient, length, want_weights)
            sent = self._sent(worker, gradient.sequence)
            self._statistics.took(began_at - asked_at, time.perf_counter() - began_at)
        return self._reduced(worker, gradient.sequence, reply, wish, base, sent)

    def flush(self) -> int:
        """Apply what still waits to be merged; returns the version."""
        with self._changed:
            self._apply_merge()
            self._close_round()
            return self._version

    def forget(self, worker: str) -> None:
        """Free what is kept for a worker that is gone; its next sequence may start again."""
        with self._changed:
            self._workers.pop(worker, None)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate from the next update on."""
        with self._changed:
            self._engine.set_learning_rate(value)

    def statistics(self) -> dict[str, Any]:
        """Counts of this shard and per worker, ready for JSON."""
        with self._changed:
            return {"version": self._version, **self._statistics.to_json()}

    def read(self, *, weights_only: bool = False) -> tuple[Vector, dict[int, npt.NDArray[Any]]]:
        """Copies of weights and of the shard's part of the optimizer's variables, at one moment."""
        with self._changed:
            return self._engine.read(weights_only=weights_only)

    def write(self, weights: Vector, optimizer: dict[int, npt.NDArray[Any]]) -> int:
        """Replace weights and, where given, optimizer variables: a new version; drops what waits to be merged.

        Raises:
            ShapeMismatch: the weights have another size.
        """
        if weights.shape != (self.size,):
            raise ShapeMismatch(f"Write: expected {self.size} weights. Received: shape {weights.shape}.")
        with self._changed:
            self._merge.drop()
            self._round = None
            self._engine.write(weights, optimizer)
            for worker in self._workers.values():
                worker.whole = True  # a difference to weights this far away would be a coarse one
            self._recorder.renew()
            self._advance()
            return self._version

    def _reduced(
        self, name: str, sequence: int, reply: Reply, wish: Wish | None, base: Backup | None, sent: Backup | None
    ) -> Reply:
        """The answer with the wished difference in place of its weights.

        Not under the lock, which the other workers wait for. Meanwhile the backup is what the answer holds without the
        wish; the same request on another stream may be answered with it, and is then.
        """
        if wish is None or base is None or sent is None or reply.weights is None:
            return reply
        made = difference_to(self._engine.array(base.weights), reply.weights, wish)
        if made is None:
            return reply
        difference, holds_then = made
        backup = replace(sent, weights=self._engine.tensor(holds_then))
        with self._changed:
            if self._sent(name, sequence) is not sent:
                return reply
            self._workers[name].backups.add(sequence, backup)
        return replace(reply, weights=None, difference=difference)

    # -- under the lock

    def _push_alone(self, name: str, gradient: Gradient, length: float, want_weights: bool) -> Reply:
        worker = known(self._workers, name)
        if gradient.sequence <= worker.sequence:
            return self._duplicate(name, gradient.sequence, want_weights)
        backup = worker.backups.used(name, gradient.computed_on)
        worker.sequence = gradient.sequence
        staleness = self._version - backup.version
        anchor = self._recorder.anchor(self._snapshot, len(self._workers))
        made: Stepped | None = None
        applied = math.isfinite(length)
        if applied and self._merge.waits:
            worker.rule = self._merge.take(gradient, backup, staleness, worker.rule, length)
            applied = not self._merge.complete or self._apply_merge()
        elif applied:
            args = (self._engine.tensor(gradient.values), backup.weights, staleness, worker.rule)
            made = self._engine.step(*args, length=length, rate=gradient.rate, anchor=anchor)
            applied = made is not None
        if made is not None:
            worker.rule = made.worker
            self._advance()
        self._statistics.count(name, staleness, applied)
        if not want_weights:
            return Reply(self._version, None, staleness, applied)
        sent = made.sent if made is not None else self._engine.reply(staleness, anchor=anchor)
        return self._send(name, gradient.sequence, sent, staleness=staleness, applied=applied)

    def _apply_merge(self) -> bool:
        """Apply what is merged, if there is something; False where that was refused."""
        applied = self._merge.finish()
        if applied:
            self._advance()
        return applied is not False

    def _push_part(self, name: str, gradient: Gradient, length: float, want_weights: bool) -> Reply:
        if gradient.round <= self._closed_round:
            return self._duplicate(name, gradient.sequence, want_weights)
        current = self._round or Round(self._engine, gradient)
        current.check(name, gradient)
        self._round = current
        if current.has(gradient.part):
            return self._duplicate(name, gradient.sequence, want_weights)
        current.take(gradient, length)
        closed = not current.complete or self._close_round()
        applied = math.isfinite(length) and closed
        self._statistics.count(name, 0, applied)
        if not want_weights:
            return Reply(self._version, None, 0, applied)
        return self._send(name, gradient.sequence, Sent(self._snapshot()), applied=applied)

    def _close_round(self) -> bool:
        """Apply the parts that have come as one gradient; False where that was refused."""
        current, self._round = self._round, None
        if current is None:
            return True
        self._closed_round = current.number
        current.finish()
        if not current.pending.count:
            return True
        if self._round_rule is None:
            self._round_rule = self._engine.new_worker()
        made = self._engine.step_round(current.pending, self._round_rule)
        if made is not None:
            self._round_rule = made
            self._advance()
        return made is not None

    def _duplicate(self, name: str, sequence: int, want_weights: bool) -> Reply:
        """Answer as the first time where that is still known: it is then what the worker holds."""
        self._statistics.count_duplicate(name)
        if not want_weights:
            return Reply(self._version, None, 0, False)
        again, sent = self._again(name, sequence, applied=False), self._sent(name, sequence)
        staleness = sent.staleness if sent else 0
        return again or self._send(name, sequence, Sent(self._snapshot()), staleness=staleness, applied=False)

    def _again(self, name: str, sequence: int, *, applied: bool = True) -> Reply | None:
        """The answer that this request got before, if it is still known; with newer weights where none are kept."""
        sent = self._sent(name, sequence)
        if sent is None:
            return None
        if sent.weights is None:
            return self._send(name, sequence, Sent(self._snapshot()), staleness=sent.staleness, applied=applied)
        self._workers[name].backups.add(sequence, replace(sent))  # not to be replaced by a difference any more
        return Reply(sent.version, self._engine.array(sent.weights), sent.staleness, applied)

    def _sent(self, name: str, sequence: int) -> Backup | None:
        return self._workers[name].backups.get(sequence) if name in self._workers else None

    def _base(self, name: str, sequence: int, wish: Wish | None) -> Backup | None:
        """What the worker holds, where the answer to this request may be a difference to it.

        A request that comes again, on whatever stream, is answered with all of the weights it got first: a new
        difference would not make exactly these, and which of the two the worker takes is not known here.
        """
        if wish is None or name not in self._workers or self._recorder.kind != "exact":
            return None
        again = self._workers[name].whole or self._sent(name, sequence)
        return None if again else self._sent(name, wish.base)

    def _snapshot(self) -> Any:
        """The weights of this version, one copy for all workers that ask for them."""
        if self._shared is None:
            self._shared = self._engine.weights()
        return self._shared

    def _advance(self) -> None:
        self._version += 1
        self._shared = None
        self._changed.notify_all()

    def _send(self, name: str, sequence: int, sent: Sent, *, staleness: int = 0, applied: bool = True) -> Reply:
        """Note what the worker may hold from now on, and make the answer."""
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = WorkerRecord(Backups(self.overlap + 1), self._engine.new_worker())
        worker.whole = False
        worker.backups.add(sequence, Backup(self._recorder.of(sent.compact), self._version, staleness))
        return Reply(self._version, self._engine.array(sent.weights), staleness, applied)
