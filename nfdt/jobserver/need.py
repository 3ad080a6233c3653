"""How many slots a job that waits lacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """Slots of one role: wanted, attending, free."""

    role: str
    wanted: int
    attending: int
    free: int

    @property
    def met(self) -> bool:
        """Whether enough are free."""
        return self.free >= self.wanted
