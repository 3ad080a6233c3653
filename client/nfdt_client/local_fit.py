"""Fits that train in this process instead of on the cluster, each with a warning and a mark in ``history.nfdt``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from nfdt.core.errors import (
    AuthenticationFailed,
    CaptureError,
    JobCancelled,
    JobTaken,
    NfdtError,
    NotInstalled,
    PolicyRefused,
    ServerUnreachable,
    VersionMismatch,
)
from nfdt_client.failures import trained_before
from nfdt_client.fit_record import FitRecord

logger = logging.getLogger(__name__)

HINT = "With fallback='local' such a fit trains in this process instead."
IN_A_FIT = "it is called while another fit trains on the cluster, as in a callback"
ELSEWHERE = (
    "the session was opened in another thread. Open one in this thread, or start it with contextvars.copy_context().run"
)
_FINAL = (AuthenticationFailed, JobCancelled, JobTaken)
_HINTED = (CaptureError, NotInstalled, PolicyRefused, ServerUnreachable, VersionMismatch)
_BEGINNING = ("on_train_begin", "on_epoch_begin", "on_train_batch_begin")
_PEEKED = 8  # more batches than are read of a generator before training begins


@dataclass(frozen=True)
class LocalFits:
    """Handler that leaves fits to Keras, and reports each of them.

    Attributes:
        reason: Why the fits are not distributed.
    """

    reason: str

    def call(
        self, method: str, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call Keras' own method."""
        if method != "fit":
            return original(model, *args, **kwargs)
        logger.warning("This model.fit trains in this process, not on the cluster: %s", self.reason)
        history = original(model, *args, **kwargs)
        history.nfdt = FitRecord({}, where="local", reason=self.reason)
        return history


class Fallback:
    """Keras' own fit in this process, for a call that the cluster may refuse.

    Args:
        arguments: Arguments of ``fit`` by name.
        mode: The option ``fallback``.

    Attributes:
        arguments: The arguments for the cluster.
    """

    def __init__(self, arguments: dict[str, Any], mode: str) -> None:
        self.arguments = arguments
        self._wanted = mode == "local"
        self._batches: _Recorded | None = None
        self._listeners: Any = None
        self._steps: int | None = None
        if self._wanted and isinstance(arguments["x"], GeneratorType):
            self._batches = _Recorded(arguments["x"])
            self.arguments = {**arguments, "x": self._batches.read()}

    def mark_begun(self, listeners: Any, steps: int | None) -> None:
        """Record that the callbacks have seen the beginning of the training, up to the first batch.

        Args:
            listeners: Keras' CallbackList.
            steps: Steps per epoch in one process; None: unknown.
        """
        self._listeners, self._steps = listeners, steps

    def applies(self, error: Exception) -> bool:
        """Whether to train in this process after this error; if that is an option only, the error names it."""
        possible = may_train_here(error) and (self._batches is None or self._batches.complete)
        if possible and not self._wanted and isinstance(error, _HINTED):
            error.add_note(HINT)
        return possible and self._wanted

    def run(self, original: Callable[..., Any], model: Any, error: Exception) -> Any:
        """Train in this process because of an error, and return Keras' History."""
        arguments = dict(self.arguments)
        if self._batches is not None:
            arguments["x"] = self._batches.read_again()
        if self._listeners is not None:
            arguments["callbacks"] = self._listeners
            self._listeners.set_params({**(self._listeners.params or {}), "steps": self._steps})
            # Keras' fit begins anew, but the callbacks have seen these hooks before the cluster refused.
            for hook in _BEGINNING:
                skip_once(self._listeners, hook)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return LocalFits(reason).call("fit", original, model, (), arguments)


def may_train_here(error: Exception) -> bool:
    """Whether the error means that the cluster cannot train, and nothing has been trained."""
    found = error if isinstance(error, NfdtError) else error.__cause__
    return isinstance(found, NfdtError) and not isinstance(found, _FINAL) and not trained_before(error)


def skip_once(listeners: Any, hook: str) -> None:
    """Ignore the next call of a hook, which Keras' fit makes, but the callbacks have seen."""

    def skip(*_: Any) -> None:
        delattr(listeners, hook)

    setattr(listeners, hook, skip)


class _Recorded:
    """A generator of batches that can be read again from its first batch, unless it has been read far.

    Args:
        batches: The generator.

    Attributes:
        complete: Whether it can be read again.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.complete = batches, True
        self._first: list[Any] = []

    def read(self) -> Iterator[Any]:
        """Yield the batches."""
        for batch in self._batches:
            self.complete = len(self._first) < _PEEKED
            if self.complete:
                self._first.append(batch)
            yield batch

    def read_again(self) -> Iterator[Any]:
        """Yield the batches that have been read, then the others."""
        yield from itertools.chain(self._first, self._batches)
