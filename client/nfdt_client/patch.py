"""Patches ``fit``, ``evaluate`` and ``predict`` of ``keras.Model`` while any session is open."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol

from nfdt_client.local_fit import ELSEWHERE, LocalFits
from nfdt_client.tracebacks import hide_frames

KerasMethod = Callable[..., Any]
METHODS = ("fit", "evaluate", "predict")


class CallHandler(Protocol):
    """Carries out calls of a model's methods in place of Keras."""

    def call(
        self, method: str, original: KerasMethod, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out ``model.METHOD(*args, **kwargs)``; ``original`` is Keras' own method."""
        ...


# Session that a call of this context belongs to; None outside of all. Each thread has its own context.
_current: ContextVar[CallHandler | None] = ContextVar("nfdt_session", default=None)


def enter(handler: CallHandler | None) -> Token[CallHandler | None]:
    """Route this context's calls to ``handler``."""
    return _current.set(handler)


def current_handler() -> CallHandler | None:
    """Return the handler of this context's calls; None without one."""
    return _current.get()


def leave(token: Token[CallHandler | None]) -> None:
    """Undo the matching :func:`enter`."""
    try:
        _current.reset(token)
    except ValueError:  # entered in another context, whose end this is
        _current.set(None)


def bind(method: KerasMethod, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults filled in; wrong ones raise Python's own TypeError."""
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    return arguments


class FitPatch:
    """Replaces the :data:`METHODS` of one model class, as long as at least one user needs it.

    A replacement looks the session up in the context: without one, as in other threads, the call is Keras' own.
    While a session is open anywhere, such a fit is reported.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own: dict[str, KerasMethod | None] = {}  # the class's own attributes; None where it only inherits one
        self._ours: dict[str, KerasMethod] = {}

    def install(self, model_class: Any) -> None:
        """Replace the methods of a class, unless they are replaced already."""
        with self._lock:
            self._users += 1
            for name in METHODS if self._users == 1 else ():
                self._own[name] = vars(model_class).get(name)
                self._ours[name] = self._capturing(name, getattr(model_class, name))
                setattr(model_class, name, self._ours[name])

    def remove(self, model_class: Any) -> None:
        """Undo one :meth:`install`; the last call restores the class.

        A replacement that other code has wrapped meanwhile stays, and forwards every call to Keras.
        """
        with self._lock:
            self._users -= 1
            for name in METHODS if not self._users else ():
                if vars(model_class).get(name) is not self._ours[name]:  # other code has wrapped ours
                    continue
                if (own := self._own[name]) is None:
                    delattr(model_class, name)
                else:
                    setattr(model_class, name, own)

    def _capturing(self, name: str, original: KerasMethod) -> KerasMethod:
        @hide_frames
        @functools.wraps(original)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            handler = _current.get() or (LocalFits(ELSEWHERE) if self._users else None)
            if handler is None:
                return original(model, *args, **kwargs)
            return handler.call(name, original, model, args, kwargs)

        return call


PATCH = FitPatch()  # of keras.Model: one class per process, so one patch
