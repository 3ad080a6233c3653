"""Interface between a job server and the process that starts its slots."""

from __future__ import annotations

from typing import Literal, Protocol

Role = Literal["worker", "shard"]


class Launcher(Protocol):
    """Starts slot processes that attend the server, and takes them down."""

    def ensure(self, role: Role, count: int) -> None:
        """Have ``count`` living slot processes of this role that this launcher started; returns at once."""
        ...

    @property
    def failure(self) -> str | None:
        """Why no slots can be started; None while they can."""
        ...

    def stop(self) -> None:
        """End every slot process and wait for it, up to a deadline."""
        ...
