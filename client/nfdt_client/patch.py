"""``keras.Model.fit``, replaced while a session is open and put back when the last one closes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Protocol

FitFunction = Callable[..., Any]


class FitHandler(Protocol):
    """Runs a ``fit`` call in Keras' place."""

    def fit(self, original: FitFunction, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out ``model.fit(*args, **kwargs)``; ``original`` is Keras' own method."""
        ...


# Which session a fit of this context belongs to; None: Keras' own fit. Other threads have contexts of their own.
_current: ContextVar[FitHandler | None] = ContextVar("nfdt_session", default=None)


def enter(handler: FitHandler | None) -> Token[FitHandler | None]:
    """Send this context's fits to ``handler``; None sends them to Keras."""
    return _current.set(handler)


def leave(token: Token[FitHandler | None]) -> None:
    """Undo the matching :func:`enter`."""
    _current.reset(token)


class FitPatch:
    """The attribute ``fit`` of one model class, replaced while at least one user wants it to be.

    The replacement asks the context: a fit outside any session, or in a thread that has none, is Keras' own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own: FitFunction | None = None  # what stood in the class itself, which may be nothing
        self._ours: FitFunction | None = None

    def install(self, model_class: Any) -> None:
        """Replace ``model_class.fit``, unless that is done already."""
        with self._lock:
            if self._users == 0:
                self._own = vars(model_class).get("fit")
                self._ours = _capturing(model_class.fit)
                model_class.fit = self._ours
            self._users += 1

    def remove(self, model_class: Any) -> None:
        """Give one :meth:`install` back; the last one puts the class as it was.

        A replacement that other code has wrapped meanwhile stays, and passes every fit on to Keras.
        """
        with self._lock:
            self._users -= 1
            if self._users or vars(model_class).get("fit") is not self._ours:
                return
            if self._own is None:
                del model_class.fit
            else:
                model_class.fit = self._own


def _capturing(original: FitFunction) -> FitFunction:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler = _current.get()
        return original(self, *args, **kwargs) if handler is None else handler.fit(original, self, args, kwargs)

    return fit


PATCH = FitPatch()  # of keras.Model: there is one class in the process, so there is one patch
