"""Patch of ``keras.Model.fit``: replaced while a session is open, restored when the last one closes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Protocol

from nfdt_client.local_fit import ELSEWHERE, LocalFits
from nfdt_client.tracebacks import hide_frames

FitFunction = Callable[..., Any]


class FitHandler(Protocol):
    """Handler that runs a ``fit`` call in place of Keras."""

    def fit(self, original: FitFunction, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out ``model.fit(*args, **kwargs)``; ``original`` is Keras' own method."""
        ...


# Session that a fit of this context belongs to; None outside of all. Each thread has its own context.
_current: ContextVar[FitHandler | None] = ContextVar("nfdt_session", default=None)


def enter(handler: FitHandler | None) -> Token[FitHandler | None]:
    """Route this context's fits to ``handler``."""
    return _current.set(handler)


def leave(token: Token[FitHandler | None]) -> None:
    """Undo the matching :func:`enter`."""
    try:
        _current.reset(token)
    except ValueError:  # entered in another context, whose end this is
        _current.set(None)


class FitPatch:
    """Reference-counted replacement of the attribute ``fit`` of one model class.

    The replacement looks the session up in the context: without one, as in other threads, the fit is Keras' own.
    While a session is open anywhere, it reports such a fit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own: FitFunction | None = None  # the class's own attribute; None if it only inherits one
        self._ours: FitFunction | None = None

    def install(self, model_class: Any) -> None:
        """Replace ``model_class.fit``, unless it is replaced already."""
        with self._lock:
            if self._users == 0:
                self._own = vars(model_class).get("fit")
                self._ours = self._capturing(model_class.fit)
                model_class.fit = self._ours
            self._users += 1

    def remove(self, model_class: Any) -> None:
        """Undo one :meth:`install`; the last call restores the class.

        A replacement that other code has wrapped meanwhile stays, and forwards every fit to Keras.
        """
        with self._lock:
            self._users -= 1
            if self._users or vars(model_class).get("fit") is not self._ours:
                return
            if self._own is None:
                del model_class.fit
            else:
                model_class.fit = self._own

    def _capturing(self, original: FitFunction) -> FitFunction:
        @hide_frames
        @functools.wraps(original)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            handler = _current.get() or (LocalFits(ELSEWHERE) if self._users else None)
            return original(model, *args, **kwargs) if handler is None else handler.fit(original, model, args, kwargs)

        return fit


PATCH = FitPatch()  # of keras.Model: one class per process, so one patch
