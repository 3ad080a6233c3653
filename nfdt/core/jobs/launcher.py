"""Interface between a job server and the process that starts its slots."""

from __future__ import annotations

from typing import Literal, Protocol

Role = Literal["worker", "shard"]


class Launcher(Protocol):
    """Starts slot processes that register with the server, and stops them."""

    def ensure(self, role: Role, count: int, backend: str = "") -> None:
        """Keep ``count`` slot processes of this role, started by this launcher, alive; returns at once.

        ``backend``: that of Keras in the workers that are started from now on; "" for no change.
        """
        ...

    @property
    def failure(self) -> str | None:
        """Reason why no slots can be started; None while they can."""
        ...

    def stop(self) -> None:
        """End every slot process and wait for it, up to a deadline."""
        ...
