"""Entry points of the client: ``distribute``, ``session``, ``submit``. Importing this imports no Keras."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from nfdt.core.errors import UsageError
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt_client.job import job_names
from nfdt_client.local_fit import Fallback
from nfdt_client.option_types import FitOptions
from nfdt_client.options import Options, resolve
from nfdt_client.session import Session
from nfdt_client.tracebacks import hide_frames

if TYPE_CHECKING:
    from nfdt_client.handle import JobHandle

F = TypeVar("F", bound=Callable[..., Any])


def _options(options: Mapping[str, Any] | None, arguments: Mapping[str, Any], default: str) -> Options:
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"options: expected a mapping of names to values. Received: {options!r}.")
    given = {**(options or {}), **{name: value for name, value in arguments.items() if value is not None}}
    resolved = resolve(given, default_algorithm=default)
    if resolved.fallback == "error":
        resolved.require_backend()
    return resolved


@overload
def distribute(fn: F) -> F: ...
@overload
def distribute(
    fn: None = None,
    *,
    workers: int | None = None,
    algorithm: str | None = None,
    server: str | None = None,
    options: Mapping[str, Any] | None = None,
    default_algorithm: str = DEFAULT_PRESET,
    **overrides: Unpack[FitOptions],
) -> Callable[[F], F]: ...
@hide_frames
def distribute(
    fn: Any = None,
    *,
    workers: int | None = None,
    algorithm: str | None = None,
    server: str | None = None,
    options: Mapping[str, Any] | None = None,
    default_algorithm: str = DEFAULT_PRESET,
    **overrides: Unpack[FitOptions],
) -> Any:
    """Decorate a function, with or without parentheses: every ``model.fit`` during its call trains on a cluster.

    Args:
        fn: The function.
        workers: Number of workers; default 2, or all that the server has.
        algorithm: A preset, as in ``"ddc-asgd"`` (default), ``"bsp"``, ``"asgd"``.
        server: ``HOST:PORT`` of a job server; without it one is started here for each call and stopped after it.
        options: More options as a mapping, for names that are no Python identifiers (``"emulate.slowdown"``).
        default_algorithm: The preset if none is named in code, environment or file.
        **overrides: Any other option: ``update_rule``, ``staleness_bound``, ``dc_lambda``, ``shards``, ``emulate``, ...

    Raises:
        UsageError: unknown options or bad values; raised at decoration, and the message names similar or valid ones.
        CaptureError: Keras runs, or will run, on a backend on which the algorithm cannot train; raised at decoration
            as well.
    """
    named = {"workers": workers, "algorithm": algorithm, "server": server, **overrides}
    resolved = _options(options, named, default_algorithm)

    names = job_names(resolved.job)

    def decorate(function: F) -> F:
        _check_function(function, "distribute")

        @hide_frames
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Session(resolved, names=names):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate if fn is None else decorate(fn)


@hide_frames
def session(
    *,
    workers: int | None = None,
    algorithm: str | None = None,
    server: str | None = None,
    options: Mapping[str, Any] | None = None,
    default_algorithm: str = DEFAULT_PRESET,
    **overrides: Unpack[FitOptions],
) -> Session:
    """Return a session for a ``with`` block; takes the same arguments as :func:`distribute`."""
    named = {"workers": workers, "algorithm": algorithm, "server": server, **overrides}
    return Session(_options(options, named, default_algorithm))


class _Submitted(BaseException):
    """Exception that leaves the user's function once its job is submitted; ``except Exception`` does not catch it."""

    def __init__(self, handle: JobHandle) -> None:
        super().__init__("the job is submitted")
        self.handle = handle


class _Submitter(Session):
    """A session whose first fit is submitted as a detached job instead of run."""

    warns_if_idle = False

    def _fit(self, model: Any, arguments: dict[str, Any], fallback: Fallback) -> Any:
        from nfdt_client.cluster_fit import submit_fit  # imports Keras

        raise _Submitted(submit_fit(self, model, arguments))


@hide_frames
def submit(
    fn: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    algorithm: str | None = None,
    server: str | None = None,
    options: Mapping[str, Any] | None = None,
    default_algorithm: str = DEFAULT_PRESET,
    **overrides: Unpack[FitOptions],
) -> JobHandle:
    """Run ``fn`` up to its first ``fit`` and submit that as a job that no longer needs this script.

    ``fn`` ends there: code after the ``fit`` is not run, but its ``finally`` blocks are. Of its callbacks, Keras' own
    EarlyStopping, LearningRateScheduler, ReduceLROnPlateau and TerminateOnNaN go with the job.

    Args:
        fn: The function.
        *args: Its arguments.
        workers: As for :func:`distribute`.
        algorithm: As for :func:`distribute`.
        server: As for :func:`distribute`, but required.
        options: As for :func:`distribute`.
        default_algorithm: As for :func:`distribute`.
        **overrides: As for :func:`distribute`.

    Raises:
        UsageError: no server, no fit, other callbacks, or data that only this script can read.
    """
    _check_function(fn, "submit")
    named = {"workers": workers, "algorithm": algorithm, "server": server, **overrides}
    resolved = _options(options, named, default_algorithm)
    if resolved.server is None:
        raise UsageError(
            "submit: expected server='HOST:PORT' or NFDT_SERVER in the environment. Received: none. A server "
            "embedded in this script would end with it."
        )
    try:
        with _Submitter(replace(resolved, fallback="error")):
            fn(*args)
    except _Submitted as submitted:
        return submitted.handle
    what = getattr(fn, "__name__", repr(fn))
    raise UsageError(f"submit: expected {what} to call model.fit. It returned without a fit that could be submitted.")


def _check_function(function: Any, name: str) -> None:
    if not callable(function):
        raise UsageError(f"{name}: expected a function. Received: {function!r}. Options go by name: {name}(workers=4).")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(f"{name}: expected a plain function. Received: {function!r}, whose body runs after the call.")
