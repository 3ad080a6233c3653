"""Statistics per worker: its reported totals and the shards' counts, as in ``history.nfdt``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_STATISTICS_BYTES = 2**20
RING = "ring"  # allreduce that a group has timed: for the server, not for history.nfdt
RECENT = "recent"  # times of the latest steps of each member of a group: for the server, not for history.nfdt


def parse_statistics(text: str) -> dict[str, Any]:
    """Return the totals of a worker; empty if they cannot be read, because statistics never fail a job."""
    if not text or len(text) > MAX_STATISTICS_BYTES:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def new_decisions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the codec decisions of a worker between two of its reports; empty if they cannot be read."""

    def decisions(report: Mapping[str, Any]) -> list[dict[str, Any]]:
        codecs = report.get("codecs")
        found = codecs.get("decisions") if isinstance(codecs, dict) else None
        listed = found if isinstance(found, list) else []
        return [d for d in listed if isinstance(d, dict) and isinstance(d.get("at_push"), int)]

    known = max((decision["at_push"] for decision in decisions(before)), default=0)
    return [decision for decision in decisions(after) if decision["at_push"] > known]


def merge_statistics(
    workers: Mapping[str, Mapping[str, Any]], shards: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    """Merge reports and counts into one entry per worker, in the order of ``workers``.

    Args:
        workers: Details (host, pid, device) and report of each worker.
        shards: Counts of each shard, with ``workers``: {name: {pushes, duplicates, dropped, staleness}}.

    Returns:
        Entries of the workers; ``duplicates`` is the sum over shards, ``dropped`` the maximum over shards, and
        ``staleness`` that of the shards if the worker reported none (it died before its first report).
    """
    merged: dict[str, dict[str, Any]] = {}
    for name, row in workers.items():
        counts = [shard.get("workers", {}).get(name, {}) for shard in shards]
        total = {**row, "duplicates": sum(int(c.get("duplicates", 0)) for c in counts)}
        for private in (RECENT, RING):
            total.pop(private, None)
        if dropped := [int(c["dropped"]) for c in counts if "dropped" in c]:
            total["dropped"] = max(dropped)  # a worker cannot distinguish dropped and repeated pushes
        if "staleness" not in total and counts:
            total["staleness"] = dict(counts[0].get("staleness", {}))
        merged[name] = total
    return merged
