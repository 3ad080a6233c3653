"""Statistics of a worker: totals since it joined the job, reported as JSON and shown in ``history.nfdt``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

FIRST_LOSS = "first_loss"
BY_RANK = "by_rank"  # of a ring or a group: the totals of each rank
_DIVIDED = ("samples_per_s", "batch_size")


class Traffic(Protocol):
    """Traffic counters of a client of the shards."""

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent."""

    @property
    def bytes_received(self) -> int:
        """Number of bytes received."""

    @property
    def codecs(self) -> Mapping[str, Any]:
        """Codecs in use, where they are chosen while the job runs."""


@dataclass
class PushOutcomes:
    """Outcomes of a worker's pushes.

    Attributes:
        exchange_s: Time spent waiting for shards; an exchange during a computation is not counted.
        staleness: Number of pushes of each staleness.
        batch_sizes: Number of pushes of each number of samples.
        dropped: Number of pushes that the shards did not apply.
    """

    exchange_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    dropped: int = 0


@dataclass
class WorkerStatistics(PushOutcomes):
    """Totals of one worker.

    Attributes:
        samples: Number of samples of its gradients.
        steps: Number of gradients.
        compute_s: Time spent computing gradients.
        wait_s: Time spent waiting for instructions.
        first_loss: Loss of the first batch; None: none yet, or no finite number.
        push_s: Time between pushes and their replies, hidden or not.
    """

    samples: int = 0
    steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    first_loss: float | None = None
    push_s: float = 0.0

    def to_json(self, client: Traffic, codec: str, **more: float) -> str:
        """Return the totals as one JSON object, with additional ones."""
        return json.dumps(
            {
                **step_totals(self.samples, self.steps, self.compute_s + self.exchange_s, self.compute_s),
                "exchange_s": round(self.exchange_s, 6),
                "wait_s": round(self.wait_s, 6),
                **({} if self.first_loss is None else {FIRST_LOSS: self.first_loss}),
                **push_totals(self, client),
                **codec_totals(codec, client.codecs),
                **more,
            }
        )


def step_totals(samples: int, steps: int, seconds: float, compute_s: float) -> dict[str, Any]:
    """Return the totals that every kind of worker has."""
    return {"samples": samples, "steps": steps, "seconds": round(seconds, 6), "compute_s": round(compute_s, 6)}


def push_totals(counts: PushOutcomes, traffic: Traffic) -> dict[str, Any]:
    """Return the totals of a worker that pushes to shards, without ``exchange_s``."""
    return {
        "staleness": {str(k): v for k, v in sorted(counts.staleness.items())},
        "batch_sizes": {str(k): v for k, v in sorted(counts.batch_sizes.items())},
        "dropped": counts.dropped,
        "bytes_sent": traffic.bytes_sent,
        "bytes_received": traffic.bytes_received,
    }


def split_by_rank(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return statistics of workers with a row for each rank, ``worker-0/rank-1``, in place of those of a ring.

    Values of the whole ring, such as its traffic with shards, are in the row of its first rank. Speed and batch size
    are divided in proportion to the samples of the ranks.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, found in workers.items():
        ring = {key: value for key, value in found.items() if key != BY_RANK}
        ranks = found.get(BY_RANK) or []
        if len(ranks) < 2:
            rows[name] = ring
            continue
        whole = sum(own["samples"] for own in ranks) or 1
        for rank, own in enumerate(ranks):
            row = {**(ring if rank == 0 else {}), **own}
            row.update({key: ring[key] * own["samples"] / whole for key in _DIVIDED if key in ring})
            rows[f"{name}/rank-{rank}"] = row
    return rows


def codec_totals(codec: str, codecs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the codec of the job, and the codecs in use where they are chosen while it runs."""
    return {"codec": codec, **({"codecs": dict(codecs)} if codecs else {})}
