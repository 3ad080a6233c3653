"""Keras' train-batch hooks of a fit on the cluster: when training pauses for them, and how they are called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.model.keras_internals import training as keras_training
from nfdt_client.callbacks import HOOKS, has_own_hook, reads_batches, saves_at_batches
from nfdt_client.options import why_never_exact

logger = logging.getLogger(__name__)

Pauses = Callable[[int], int]
"""After so many steps of an epoch that are done: after how many training stands still next."""


def watches_batches(callback: Any) -> bool:
    """Whether a callback has batch hooks that are not known to be harmless."""
    writes = type(callback).__name__ == "TensorBoard" and getattr(callback, "update_freq", "epoch") != "epoch"
    return writes or has_own_hook(callback, HOOKS)


def any_watches_batches(callbacks: Sequence[Any]) -> bool:
    """Whether one of the callbacks may read the model between batches."""
    return any(saves_at_batches(callback) or watches_batches(callback) for callback in callbacks)


def choose_mode(mode: str, algorithm: AlgorithmSpec, data: str, callbacks: Sequence[Any], logged: set[str]) -> str:
    """Return ``exact`` in place of ``auto`` where a callback reads batches and nothing prevents it, and log it.

    Args:
        mode: The option ``batch_hooks``.
        algorithm: Algorithm of the job.
        data: The option ``data``; workers read datasets in an order of their own.
        callbacks: Callbacks passed to the fit.
        logged: Lines that the session has logged, which are not logged again; new ones are added.
    """
    may_be_exact = mode == "auto" and data != "workers" and not why_never_exact(algorithm)
    readers = list(filter(reads_batches, callbacks)) if may_be_exact else []
    if not readers:
        return mode
    _warn(
        f"{_named(readers)}: the batch hooks read batch numbers, logs or the model, so every batch waits for them "
        "(batch_hooks='exact'), which is slow. With batch_hooks='approximate' they are called some steps late, and "
        "training does not wait.",
        logged,
    )
    return "exact"


def plan_pauses(
    mode: str, algorithm: AlgorithmSpec, callbacks: Sequence[Any], size: int, logged: set[str]
) -> Pauses | None:
    """Plan when training pauses for the batch hooks; None means never. Logs which callbacks are approximate.

    Args:
        mode: The option ``batch_hooks``.
        algorithm: Algorithm of the job.
        callbacks: Callbacks of the fit.
        size: Batches between two calls of the hooks (``steps_per_execution``).
        logged: Lines that the session has logged, which are not logged again; new ones are added.
    """
    if mode == "exact":
        return lambda done: done + size
    if mode == "approximate":
        return None
    savers, lookers = list(filter(saves_at_batches, callbacks)), list(filter(watches_batches, callbacks))
    obstacle = why_never_exact(algorithm)
    if savers and not obstacle:
        _warn(f"{_named(savers)}: training stands still at the batches after which it saves (batch_hooks).", logged)
    else:
        lookers = [c for c in callbacks if c in savers or c in lookers]
    if lookers:
        remedy = (
            f"Exact ones need another algorithm: {algorithm.name!r} is one {obstacle}."
            if obstacle
            else "With batch_hooks='exact' every batch waits for its hooks, which is slow."
        )
        _warn(
            f"{_named(lookers)}: the batch hooks are called some steps late, with weights and logs of a later moment; "
            f"a learning rate that they set counts from then on (batch_hooks='approximate'). {remedy}",
            logged,
        )
    if not savers or obstacle:
        return None
    return lambda done: min(_next_save(saver, done, size) for saver in savers)


def _warn(line: str, logged: set[str]) -> None:
    if line not in logged:
        logged.add(line)
        logger.warning("%s", line)


def _named(callbacks: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(type(callback).__name__ for callback in callbacks))


def _next_save(saver: Any, done: int, size: int) -> int:
    """Return the number of batches of the epoch after which the callback saves next."""
    missing = max(1, saver.save_freq - keras_training.batches_seen(saver, saver.save_freq - 1))
    return done + -(-missing // size) * size


def as_returned(logs: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return logs with the dictionaries within them that ``train_step`` returns.

    Keras sorts the logs of each dictionary by name before it joins them, so these decide the order of a History.

    Args:
        logs: Logs without dictionaries.
        groups: Names of the dictionaries that hold a log, outermost first, by its name; other logs are in none.
    """
    returned: dict[str, Any] = {}
    for name, value in logs.items():
        inner = returned
        for group in groups.get(name, ()):
            inner = inner.setdefault(group, {})
        inner[name] = value
    return returned


class BatchHooks:
    """Calls the batch hooks in Keras' order, one pair of calls per ``size`` batches.

    Args:
        callbacks: Keras' CallbackList.
        model: The model; its ``stop_training`` ends the calls.
        size: Batches between two calls.
        log_groups: See :func:`as_returned`.

    Attributes:
        done: Batches of the epoch whose hooks have been called.
        stopped: True once a callback has set ``stop_training`` by the end of a batch; no hook is called after that.
    """

    def __init__(self, callbacks: Any, model: Any, size: int, log_groups: Mapping[str, tuple[str, ...]]) -> None:
        self.done, self.stopped = 0, False
        self._log_groups = log_groups
        self._callbacks, self._model, self._size = callbacks, model, size
        self._begun = False

    def begin_epoch(self) -> None:
        """Start to count the batches of another epoch, whose first batch has begun already."""
        self.done, self._begun = 0, True

    def begin(self) -> None:
        """Begin the next batch, unless it has begun."""
        if not self._begun and not self.stopped:
            self._callbacks.on_train_batch_begin(self.done)
            self._begun = True

    def advance(self, steps: int, logs: dict[str, Any], *, flush: bool = False) -> None:
        """Call the hooks up to ``steps`` finished steps of the epoch.

        With ``flush`` the last call may cover fewer batches than ``size``; Keras too numbers it as a full one. Without
        it the hooks wait for logs: those of Keras hold all metrics from the first batch on.
        """
        if not logs and not flush:
            return
        while not self.stopped and (self.done + self._size <= steps or (flush and self.done < steps)):
            self.begin()
            last = self.done + self._size - 1
            self.done = min(last + 1, steps)
            self._begun = False
            self._callbacks.on_train_batch_end(last, as_returned(logs, self._log_groups))
            self.stopped = bool(self._model.stop_training)
