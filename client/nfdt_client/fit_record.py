"""Record of one fit on the cluster, in ``history.nfdt``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FitRecord(dict[str, Any]):
    """Statistics of each worker by its name.

    Args:
        workers: Statistics of each worker.
        data: Place where the training data were read, and the reason: ``{"where": ..., "reason": ...}``.

    Attributes:
        data: As given.
    """

    def __init__(self, workers: Mapping[str, Any], data: Mapping[str, str]) -> None:
        super().__init__(workers)
        self.data = dict(data)
