"""Parsing of requests outside of grpcio, which leaks the state of a call whose request it cannot parse."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from nfdt.core.errors import UsageError
from nfdt.core.wire.status import abort

_log = logging.getLogger(__name__)

SELDOM_S = 10.0

Parse = Callable[[bytes], Any]
Admit = Callable[[Any], None]


class Seldom:
    """Limits warnings that any peer can cause to one in ``every_s`` seconds, which states how many there were."""

    def __init__(self, log: logging.Logger, every_s: float = SELDOM_S) -> None:
        self._log, self._every_s = log, every_s
        self._lock = threading.Lock()
        self._count = 0
        self._next_at = 0.0

    def warn(self, text: str, *values: Any) -> None:
        """Log the warning, or only count it within the interval."""
        with self._lock:
            self._count += 1
            if time.monotonic() < self._next_at:
                return
            count, self._count = self._count, 0
            self._next_at = time.monotonic() + self._every_s
        more = f" ({count} such since the last line)" if count > 1 else ""
        self._log.warning(text + more, *values)


class RequestParser:
    """Wraps handlers so that they receive bytes from grpcio and parse them themselves."""

    def __init__(self) -> None:
        self._warnings = Seldom(_log)

    def wrapped(self, handler: grpc.RpcMethodHandler, method: str, admit: Admit | None) -> Any:
        """Return the handler with parsing; a malformed request ends its call with INVALID_ARGUMENT.

        Args:
            handler: Handler of the method.
            method: Name of the method.
            admit: Called for each call with a valid token; None for methods without authentication.
        """
        parse = functools.partial(self.parse, handler.request_deserializer or bytes, method)
        wrap = _taking_stream if handler.request_streaming else _taking_one
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        behaviors = {k: wrap(parse, admit, getattr(handler, k)) for k in kinds if getattr(handler, k)}
        return handler._replace(request_deserializer=None, **behaviors)  # type: ignore[attr-defined]

    def parse(self, deserialize: Parse, method: str, data: bytes) -> Any:
        """Return the request of a method.

        Raises:
            UsageError: The bytes are no message of this method.
        """
        try:
            return deserialize(data)
        except Exception as error:
            self._warnings.warn("%s: a request of %d bytes is malformed", method, len(data))
            raise UsageError(
                f"{method}: expected a message of this method. Received: {len(data)} bytes of something else."
            ) from error


def _taking_one(parse: Parse, admit: Admit | None, behavior: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(behavior)  # keeps the attributes that grpcio reads from a behavior that takes a callback
    def answer(data: bytes, context: grpc.ServicerContext, *callback: Any) -> Any:
        if admit:
            admit(context)
        try:
            request = parse(data)
        except UsageError as error:
            abort(context, error)
        return behavior(request, context, *callback)

    return answer


def _taking_stream(parse: Parse, admit: Admit | None, behavior: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(behavior)
    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        if admit:
            admit(context)
        return behavior(map(parse, messages), context)

    return answer
