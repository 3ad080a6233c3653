"""Conversion between NFDT's errors and gRPC status: the class is sent by name, the message as the details."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc

from nfdt.core import errors
from nfdt.core.errors import NfdtError

_log = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])

ERROR_KEY = "nfdt-error"
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # of gRPC's TLS library
MAX_DETAILS = 4000  # characters: details are sent in HTTP/2 headers, whose size peers limit to 8 KiB

# The first class that matches wins: subclasses come before their bases.
_CODES: tuple[tuple[type[NfdtError], grpc.StatusCode], ...] = (
    (errors.AuthenticationFailed, grpc.StatusCode.UNAUTHENTICATED),
    (errors.VersionMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Refused, grpc.StatusCode.PERMISSION_DENIED),
    (errors.UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.CaptureError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.JobCancelled, grpc.StatusCode.CANCELLED),
    (errors.JobFailed, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ProtocolError, grpc.StatusCode.DATA_LOSS),
    (errors.ServerUnreachable, grpc.StatusCode.UNAVAILABLE),
    (NfdtError, grpc.StatusCode.UNKNOWN),
)


def abort(context: grpc.ServicerContext, error: NfdtError) -> NoReturn:
    """End the call with this error; the peer's :func:`translate` restores the same class."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    _abort(context, code, type(error).__name__, str(error))


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, name: str, text: str) -> NoReturn:
    context.set_trailing_metadata(((ERROR_KEY, name),))
    context.abort(code, text[:MAX_DETAILS])
    raise AssertionError("abort() raises")  # for servicer contexts made by hand


def _by_code(code: grpc.StatusCode | None, details: str, address: str) -> NfdtError:
    if _UNTRUSTED in details:
        reason = details.partition(_UNTRUSTED)[2].strip(": ").removesuffix(": OK")
        return errors.AuthenticationFailed(
            f"The certificate of {address} is not trusted: {reason}. Expected: one that an authority in --ca-file "
            "has signed for this name. Give the ca.pem that `nfdt certs` made with the server's certificate."
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN) and not details.startswith("Exception"):
        return errors.ServerUnreachable(
            f"No answer from {address}: {details or 'the connection failed'}. Check the address, that the server "
            "runs, and that both sides use TLS or neither does."
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.ServerUnreachable(f"{address} did not answer in time: {details}.")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return errors.AuthenticationFailed(details or f"{address} refused the token.")
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return errors.Refused(details)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.Refused(f"{address} refused the call, a limit is reached: {details}.")
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        return errors.UsageError(details)
    if code == grpc.StatusCode.CANCELLED:  # by a peer that stops, or because this side has closed the channel
        return errors.ServerUnreachable(f"The connection to {address} was closed: {details or 'no reason'}.")
    name = code.name if code else "no status"
    return errors.ProtocolError(f"{address} answered {name}: {details}")


def translate(error: grpc.RpcError, address: str) -> NfdtError:
    """Return the exception of NFDT for a failed call to ``address``."""
    code = error.code() if hasattr(error, "code") else None
    details = (error.details() if hasattr(error, "details") else str(error)) or ""
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    name = next((str(value) for key, value in trailing or () if key == ERROR_KEY), None)
    kind = errors.error_class(name)
    if kind is not None:
        return kind(details)
    return _by_code(code, details, address)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Convert a ``grpc.RpcError`` inside the block with :func:`translate`, and raise the result without its cause.

    A traceback with the cause would show many lines of gRPC's internals to the user.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise translate(error, address) from None


@contextmanager
def _reported(context: Any, method: str) -> Iterator[None]:
    """End the call with the exception that the block raises."""
    try:
        yield
    except Exception as error:
        # The call was aborted already, or the peer is gone and the error only reports that.
        if context.code() or (isinstance(error, grpc.RpcError) and not context.is_active()):
            raise
        if isinstance(error, NfdtError):
            abort(context, error)
        _log.exception("%s failed", method)
        text = f"{method} failed on the server: {type(error).__name__}: {error}"
        _abort(context, grpc.StatusCode.INTERNAL, "ProtocolError", text)


def answering(method: _Method) -> _Method:
    """Decorate a servicer's method: an exception that it raises becomes the call's status."""
    name = method.__name__

    @functools.wraps(method)
    def unary(self: Any, request: Any, context: Any) -> Any:
        with _reported(context, name):
            return method(self, request, context)

    @functools.wraps(method)
    def stream(self: Any, request: Any, context: Any) -> Iterator[Any]:
        with _reported(context, name):
            yield from method(self, request, context)

    @functools.wraps(method)
    async def coroutine(self: Any, request: Any, context: Any) -> Any:
        with _reported(context, name):
            return await method(self, request, context)

    if inspect.iscoroutinefunction(method):
        return coroutine  # type: ignore[return-value]
    return stream if inspect.isgeneratorfunction(method) else unary  # type: ignore[return-value]
