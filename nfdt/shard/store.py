"""One shard's memory: weights and their version, what each worker holds, and pushes applied at most once.

A push is atomic under the shard's lock. Staleness of a push is the version now minus the version its worker last
received. Three ways in:

- asynchronous (``parts == 1``): corrected and applied on arrival;
- softsync (``merge_count > 1``): corrected on arrival, applied when ``merge_count`` have come;
- rounds (``parts > 1``): summed in the order of their parts, applied when the last one has come.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.shard.apply import Engine, Pending
from nfdt.shard.push import Gradient, Reply, Vector
from nfdt.shard.rounds import Round
from nfdt.shard.statistics import ShardStatistics

PULL_TIMEOUT_S = 60.0


@dataclass
class _Worker:
    """What the shard knows of one worker: what it holds (backup), since when, and its last push."""

    backup: Any
    version: int
    rule: dict[str, Any]
    sequence: int = 0


class ShardStore:
    """Thread-safe store of one shard.

    Args:
        engine: Weights, optimizer and rule; used under the store's lock only.
        merge_count: How many arriving gradients make one update (softsync); 1 applies each.
    """

    def __init__(self, engine: Engine, *, merge_count: int = 1) -> None:
        self._engine = engine
        self._merge_count = merge_count
        self._changed = threading.Condition()
        self._workers: dict[str, _Worker] = {}
        self._statistics = ShardStatistics()
        self._version = 0
        self._shared: Any = None
        self._held: Pending | None = None
        self._round: Round | None = None
        self._closed_round = -1
        self._round_rule: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._engine.size

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._version

    def pull(self, worker: str, *, min_version: int = 0, timeout_s: float = PULL_TIMEOUT_S) -> Reply:
        """The weights as they are; they become the worker's backup.

        Raises:
            ProtocolError: the shard did not reach ``min_version`` within ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._version >= min_version, timeout_s):
                raise ProtocolError(
                    f"Pull by {worker}: expected version {min_version} within {timeout_s:g} s. "
                    f"Received: version {self._version}; a push is missing."
                )
            return self._send(worker, self._snapshot(), want_weights=True)

    def push(self, worker: str, gradient: Gradient, *, want_weights: bool = True) -> Reply:
        """Apply a gradient at most once, and answer with what the worker shall hold next.

        Raises:
            ShapeMismatch: the gradient has another size.
            ProtocolError: the worker never pulled, or parts of a round contradict each other.
        """
        if gradient.values.shape != (self.size,) or gradient.values.dtype != np.float32:
            raise ShapeMismatch(
                f"Push from worker {worker}: expected {self.size} float32 elements. Received: shape "
                f"{gradient.values.shape}, {gradient.values.dtype}. The worker runs another model; restart it."
            )
        with self._changed:
            if gradient.parts > 1:
                return self._push_part(worker, gradient, want_weights)
            return self._push_alone(worker, gradient, want_weights)

    def flush(self) -> int:
        """Apply what still waits to be merged; returns the version."""
        with self._changed:
            self._apply_held()
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
            self._held = self._round = None
            self._engine.write(weights, optimizer)
            self._advance()
            return self._version

    # -- under the lock

    def _push_alone(self, name: str, gradient: Gradient, want_weights: bool) -> Reply:
        worker = self._known(name)
        if gradient.sequence <= worker.sequence:
            return self._duplicate(name, want_weights)
        worker.sequence = gradient.sequence
        staleness = self._version - worker.version
        vector = self._engine.tensor(gradient.values)
        if self._merge_count > 1:
            applied, reply = self._hold(worker, vector, staleness, gradient.samples), None
        else:
            made = self._engine.step(vector, worker.backup, staleness, worker.rule)
            applied, reply, worker.rule = made.applied, made.reply, made.worker
            if applied:
                self._advance()
        self._statistics.count(name, staleness, applied)
        if want_weights and reply is None:
            reply = self._engine.reply(staleness)
        return self._send(name, reply, staleness=staleness, applied=applied, want_weights=want_weights)

    def _hold(self, worker: _Worker, vector: Any, staleness: int, samples: int) -> bool:
        self._held = self._held or self._engine.new_pending()
        made = self._engine.hold(self._held, vector, worker.backup, staleness, worker.rule, samples)
        worker.rule = made.worker
        if self._held.count >= self._merge_count:
            self._apply_held()
        return made.applied

    def _apply_held(self) -> None:
        held, self._held = self._held, None
        if held and held.count:
            self._engine.step_held(held, self._engine.new_worker())
            self._advance()

    def _push_part(self, name: str, gradient: Gradient, want_weights: bool) -> Reply:
        if gradient.round <= self._closed_round:
            return self._duplicate(name, want_weights)
        current = self._round or Round(self._engine, gradient)
        current.check(name, gradient)
        self._round = current
        if current.has(gradient.part):
            return self._duplicate(name, want_weights)
        applied = current.take(gradient)
        self._statistics.count(name, 0, applied)
        if current.complete:
            self._close_round()
        reply = self._snapshot() if want_weights else None
        return self._send(name, reply, applied=applied, want_weights=want_weights)

    def _close_round(self) -> None:
        """Apply the parts that have come as one gradient."""
        current, self._round = self._round, None
        if current is None:
            return
        self._closed_round = current.number
        current.finish()
        if current.pending.count:
            if self._round_rule is None:
                self._round_rule = self._engine.new_worker()
            made = self._engine.step_round(current.pending, self._round_rule)
            self._round_rule = made.worker
            if made.applied:
                self._advance()

    def _duplicate(self, name: str, want_weights: bool) -> Reply:
        self._statistics.count_duplicate(name)
        return self._send(name, self._snapshot() if want_weights else None, applied=False, want_weights=want_weights)

    def _known(self, name: str) -> _Worker:
        if name not in self._workers:
            raise ProtocolError(f"Push from worker {name}: expected a pull before the first push. Received: none.")
        return self._workers[name]

    def _snapshot(self) -> Any:
        """The weights of this version, one copy for all workers that ask for them."""
        if self._shared is None:
            self._shared = self._engine.weights()
        return self._shared

    def _advance(self) -> None:
        self._version += 1
        self._shared = None
        self._changed.notify_all()

    def _send(self, name: str, weights: Any, *, want_weights: bool, staleness: int = 0, applied: bool = True) -> Reply:
        """Note what the worker holds from now on, and make the answer."""
        if not want_weights or weights is None:
            return Reply(self._version, None, staleness, applied)
        known = self._workers.get(name)
        if known is None:
            self._workers[name] = _Worker(weights, self._version, self._engine.new_worker())
        else:
            known.backup, known.version = weights, self._version
        return Reply(self._version, self._engine.array(weights), staleness, applied)
