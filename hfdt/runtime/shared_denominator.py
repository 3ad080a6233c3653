"""The denominator of a loss in the gradients of several ranks; see :mod:`nfdt.model.backends.denominator`."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from nfdt.model.backends.denominator import SUM

NAME = "hfdt_denominator"
SAMPLES, SUMS, COUNTED = b"samples", b"sums", b"counted"


class SummingRanks(Protocol):
    """The ranks, as far as denominators need them."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank."""
        ...

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over all ranks; also usable inside a graph."""
        ...


class SharedDenominator:
    """Agreement of all ranks on how gradients are combined: by samples, as sums, or by what each rank has counted.

    Only the last way needs another reduction, of one number. A rank without rows computes no loss and cannot see which
    way the loss needs, but has to join the reduction. Therefore all ranks agree in the first step of a job.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: SummingRanks) -> None:
        self._ranks = ranks
        self._agreed: bytes | None = None
        # A separate graph: only there has the operation the same name on ranks with and without rows.
        self._sum: Any = tf.function(lambda own: ranks.sum(own, NAME), input_signature=[tf.TensorSpec([], tf.float32)])

    @property
    def is_known(self) -> bool:
        """Whether the ranks have agreed."""
        return self._agreed is not None

    def reset(self) -> None:
        """Agree again in the next step, as other ranks may have joined."""
        self._agreed = None

    def agree(self, own: Any, *, has_rows: bool) -> None:
        """Agree on the kind of the denominator, given this rank's; collective. A second call does nothing."""
        if self._agreed is None:
            kind = SAMPLES if own is None else SUMS if own is SUM else COUNTED
            kinds = self._ranks.gather(kind if has_rows else b"")
            self._agreed = next((kind for kind in kinds if kind), None)

    def share(self, own: Any, share: Any) -> Any:
        """Return the weight of this rank's gradient in the mean of all; collective if denominators are counted.

        Args:
            own: Denominator of this rank, 0-d float32; None: that of its samples.
            share: Fraction of all samples in this rank's part, 0-d float32; 0 for a rank without rows.
        """
        return share if self._agreed != COUNTED else self._counted(own, share)[0]

    def union(self, own: Any, share: float) -> tuple[Any, float]:
        """Return the weight of this rank's gradient in that of all, and the denominator of that; see :meth:`share`.

        The denominator is 0 for the number of samples, and infinity for a sum, as in a push.
        """
        if self._agreed == SUMS:
            return 1.0, SUM
        if self._agreed != COUNTED:
            return share, 0.0
        weight, total = self._counted(own, tf.constant(share, tf.float32))
        return weight, float(total)

    def _counted(self, own: Any, share: Any) -> tuple[Any, Any]:
        own = share if own is None else tf.cast(own, tf.float32)
        total = self._sum(own)
        return own / total, total
