"""A cluster of this machine that outlives a fit: for notebooks, and scripts with several fits."""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from nfdt.core.errors import UsageError
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt_client.connection import JobsClient
from nfdt_client.embedded import embedded_server
from nfdt_client.option_types import FitOptions
from nfdt_client.options import Options, resolve
from nfdt_client.session import Session
from nfdt_client.tracebacks import hide_frames

_F = TypeVar("_F", bound=Callable[..., Any])


class LocalCluster:
    """Job server and workers on this machine, from now until :meth:`close` or the end of this process.

    ::

        cluster = nfdt.LocalCluster(workers=4)
        with cluster.session():
            model.fit(x, y)                    # on the four workers
        with cluster.session(algorithm="bsp"):
            other.fit(x, y)                    # on the same processes

    Args:
        workers: Number of workers; default 2.
        algorithm: A preset; sessions may name others of the same topology.
        default_algorithm: The preset if none is named in code, environment or file.
        **overrides: Any other option of :func:`nfdt.distribute`, except ``server``.

    Raises:
        UsageError: unknown options or bad values, or a server is named in the environment or a file.
    """

    @hide_frames
    def __init__(
        self,
        workers: int | None = None,
        algorithm: str | None = None,
        *,
        default_algorithm: str = DEFAULT_PRESET,
        **overrides: Unpack[FitOptions],
    ) -> None:
        self._given: dict[str, Any] = {"workers": workers, "algorithm": algorithm, **overrides}
        self._default = default_algorithm
        self._options = self._resolved({})
        self._stack = contextlib.ExitStack()
        self._server = self._stack.enter_context(embedded_server(self._options))
        self._open = True

    def _resolved(self, more: Mapping[str, Any]) -> Options:
        given = [(name, value) for name, value in (*self._given.items(), *more.items()) if value is not None]
        options = resolve(dict(given), default_algorithm=self._default)
        if options.server is not None:
            raise UsageError(f"LocalCluster: expected no server, as it is one. Received: server={options.server!r}.")
        return options

    @hide_frames
    def session(self, *, algorithm: str | None = None, **overrides: Unpack[FitOptions]) -> Session:
        """Return a session on this cluster for a ``with`` block; options replace those of the cluster.

        Raises:
            UsageError: the cluster is closed, or the options need workers of another kind.
        """
        if not self._open:
            raise UsageError("LocalCluster: expected an open one. Received: one that is closed. Make another.")
        options = self._resolved({"algorithm": algorithm, **overrides})
        ours, theirs = self._options.algorithm.topology, options.algorithm.topology
        if ours != theirs:
            raise UsageError(
                f"LocalCluster: expected an algorithm with topology {ours!r}, for which its processes were started. "
                f"Received: {options.algorithm.name!r}, whose topology is {theirs!r}. Make another cluster for it."
            )
        return Session(options, self._server)

    def distribute(self, fn: _F) -> _F:
        """Decorate a function: every ``model.fit`` during its call trains on this cluster."""

        @hide_frames
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.session():
                return fn(*args, **kwargs)

        return call  # type: ignore[return-value]

    @property
    def address(self) -> str:
        """``HOST:PORT`` of its server; waits until it serves."""
        return self._server.address()

    @property
    def page(self) -> str:
        """Link to its page, which opens it once; "" without one."""
        client = JobsClient(self.address, self._server.token, ca_file=self._server.ca_file)
        with contextlib.closing(client):
            return client.open_page()

    @hide_frames
    def close(self) -> None:
        """Stop its processes. Safe to call twice."""
        self._open = False
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _facts(self) -> dict[str, str]:
        facts = {"workers": str(self._options.cluster.workers), "algorithm": self._options.algorithm.name}
        return {**facts, "state": f"serves at {self.address}" if self._open else "closed"}

    def __repr__(self) -> str:
        return f"LocalCluster({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in self._facts().items()
        )
        page = html.escape(self.page) if self._open else ""
        link = f'<tr><th>page</th><td><a href="{page}" target="_blank">{page}</a></td></tr>' if page else ""
        return f"<table>{rows}{link}</table>"
