"""Record of one fit, in ``history.nfdt``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_HISTOGRAMS = frozenset({"staleness", "batch_sizes"})
_COUNTS = frozenset({"samples", "steps", "seconds", "compute_s", "exchange_s", "wait_s"}) | frozenset(
    {"dropped", "duplicates", "bytes_sent", "bytes_received"}
)


class FitRecord(dict[str, Any]):
    """Statistics of each worker by its name; ``record["where"]`` is the attribute of that name, and no member.

    ``where`` and ``reason`` are found by name, also by :meth:`get`; loops over the record meet workers only.

    Args:
        workers: Statistics of each worker; empty for a fit in the script's process.
        redone_samples: Number of samples that were trained again because shards were lost.
        where: Place where the fit trained.
        reason: Why it did not train on the cluster.

    Attributes:
        where: ``cluster``; ``local`` for a fit in the script's process, ``nowhere`` for one without epochs.
        reason: As given; "" for a fit on the cluster.
        redone_samples: As given.
        data: Place where the training data were read, and the reason: ``{"where": ..., "reason": ...}``.
        epochs: For each epoch ``epoch`` (from 0), ``seconds`` on the cluster, and ``samples``.
    """

    def __init__(
        self, workers: Mapping[str, Any], redone_samples: int = 0, *, where: str = "cluster", reason: str = ""
    ) -> None:
        super().__init__(workers)
        self.redone_samples = redone_samples
        self.where, self.reason = where, reason
        self.data: dict[str, str] = {}
        self.epochs: list[dict[str, Any]] = []

    def followed_by(self, later: FitRecord) -> FitRecord:
        """Return the record of a fit that two jobs have trained, one after the other, with the counts of both."""
        workers = {name: _added(self.get(name, {}), later.get(name, {})) for name in {**self, **later}}
        redone = self.redone_samples + later.redone_samples
        record = FitRecord(workers, redone, where=later.where, reason=later.reason)
        record.epochs = [*self.epochs, *later.epochs]
        return record

    def __missing__(self, name: str) -> Any:
        if name in ("where", "reason"):
            return getattr(self, name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return ``record[name]``, which may be ``where`` or ``reason``; ``default`` where there is no such entry."""
        try:
            return self[name]
        except KeyError:
            return default


def _added(before: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's later statistics, whose counts include those of before."""
    added = {**before, **later}
    for name in _COUNTS & before.keys() & later.keys():
        added[name] = before[name] + later[name]
    for name in _HISTOGRAMS & before.keys() & later.keys():
        added[name] = dict(Counter(before[name]) + Counter(later[name]))
    return added
