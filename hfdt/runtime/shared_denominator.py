"""The denominator of a loss in the gradients of several ranks; see :mod:`nfdt.model.backends.denominator`."""

from __future__ import annotations

from typing import Any, Protocol

from nfdt.model.backends.denominator import SUM

SAMPLES, SUMS, COUNTED = b"samples", b"sums", b"counted"


class GatheringRanks(Protocol):
    """The ranks, as far as they agree on a denominator."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank."""
        ...


class SharedDenominator:
    """Agreement of all ranks on how gradients are combined: by samples, as sums, or by what each rank has counted.

    Only the last way needs another reduction, of one number. A rank without rows computes no loss and cannot see which
    way the loss needs, but has to join the reduction. Therefore all ranks agree in the first step of a job.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: GatheringRanks) -> None:
        self._ranks = ranks
        self._agreed: bytes | None = None

    @property
    def is_known(self) -> bool:
        """Whether the ranks have agreed."""
        return self._agreed is not None

    @property
    def is_sum(self) -> bool:
        """Whether gradients are added up."""
        return self._agreed == SUMS

    @property
    def is_counted(self) -> bool:
        """Whether each rank's denominator is what it has counted."""
        return self._agreed == COUNTED

    def reset(self) -> None:
        """Agree again in the next step, as other ranks may have joined."""
        self._agreed = None

    def agree(self, own: Any, *, has_rows: bool) -> None:
        """Agree on the kind of the denominator, given this rank's; collective. A second call does nothing."""
        if self._agreed is None:
            kind = SAMPLES if own is None else SUMS if own is SUM else COUNTED
            kinds = self._ranks.gather(kind if has_rows else b"")
            self._agreed = next((kind for kind in kinds if kind), None)
