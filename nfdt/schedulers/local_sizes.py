"""The interface of local batch sizes that differ between workers."""

from __future__ import annotations

from typing import Protocol

from nfdt.schedulers.throughput import Speeds


class LocalSizes(Protocol):
    """Samples per step of each worker of a job; they may change after every step."""

    def of(self, worker: str) -> int:
        """Return the samples per step of this worker."""
        ...

    def joined(self, worker: str) -> None:
        """Add a worker."""
        ...

    def left(self, worker: str) -> None:
        """Remove a worker; unknown workers are no error."""
        ...

    def stepped(self, worker: str, speeds: Speeds) -> bool:
        """Record a step that ``speeds`` has measured; return whether sizes change now."""
        ...

    def split(self, total: int) -> list[tuple[str, int]]:
        """Divide a round of ``total`` samples: (worker, samples), without workers that get none."""
        ...
