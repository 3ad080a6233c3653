"""Slots that a waiting job needs, and those that are available."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotNeed:
    """Numbers of slots of one role: wanted, registered (``attending``), free."""

    role: str
    wanted: int
    attending: int
    free: int

    @property
    def met(self) -> bool:
        """Whether enough slots are free."""
        return self.free >= self.wanted
