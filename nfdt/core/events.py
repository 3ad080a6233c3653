"""Events of a job: one append-only list per job.

The list is the complete record of the job: the progress bar, ``nfdt jobs logs``, History and a client that
re-attaches all read it from a cursor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_LOGS_BYTES = 4 * 2**20  # of a validation by the client, as JSON

EventKind = Literal[
    "state",  # {"state": "queued|starting|running|succeeded|failed|cancelled", "reason": str|None, "error": {...}|None}
    # a job that a restarted server queues again: also "epoch": int, with which it goes on
    "data",  # {"where": "server arrays|workers|client", "reason": str}: where the training data are read
    "worker_joined",  # {"worker": str, "index": int, "pid": int, "host": str, "device": str}
    "worker_lost",  # {"worker": str, "reason": str, "requeued": int}
    "shard_lost",  # {"shard": str, "reason": str}
    "shards_restored",  # {"seconds": float, "redone_samples": int}: all shards, from their newest snapshot
    "epoch_begin",  # {"epoch": int, "steps": int|None}
    "groups",  # {"groups": [{"members", "rows", "step_s", "staleness", "rate"}], "reason": str}
    "progress",  # {"epoch": int, "steps": int (finished in this epoch), "samples": int, "logs": {name: float}}
    "speed",  # {"workers": {name: {"samples_per_s", "step_s", "step_exchange_s": float, "batch_size": int}}}
    "plan",  # {"row": {"topology", "batch", "overlap"}, "samples_per_s": float, "reason": str}: chosen by speed
    "slow_links",  # {"exchange_s", "step_s": float}: at an epoch's end, if the workers of a planning job wait for links
    "codec",  # {"worker": str, "push": str, "reply": str, "at_push": int, "predicted_ms", "before_ms", ...: float}
    "epoch_end",  # {"epoch", "logs": {...}, "val_logs": {...}|None, "seconds": float, "steps": int, "samples": int}: in
    # the logs a metric whose result is an array has nested lists of numbers; of a job server also "learning_rate":
    # float|None, that of the shards' optimizer or the last that was set
    "validated",  # {"epoch": int, "val_logs": {...}}: validation by the client, after the epoch's end
    "stalled",  # {"waiting_for": [worker or rank], "since_s": float, "tensors": [str] (that ranks have not submitted)}
    "forecast",  # {"samples_per_s", "staleness", "measured_samples_per_s", "measured_staleness": float, "speed_up":
    # float|None}: at each epoch's end, over all epochs but the first, of a job with a forecast
    "log",  # {"worker": str|None, "level": str, "text": str}
    "result",  # {"artifact": sha256, "method": "fit|evaluate|predict", "workers": {name: {...statistics...}}}: of fit,
    # the artifact is the trained state; of evaluate, the merged metrics; of predict, the names of artifacts of outputs
]


@dataclass(frozen=True)
class Event:
    """One event: ``cursor`` grows from 1 within the job, ``at`` is Unix time in seconds."""

    cursor: int
    at: float
    kind: EventKind
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps({"cursor": self.cursor, "at": self.at, "kind": self.kind, "data": self.data})
