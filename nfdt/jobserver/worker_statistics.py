"""What each worker did: the totals it reports and the shards' counts, as ``history.nfdt`` shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_STATISTICS_BYTES = 2**20
RECENT = "recent"  # what the latest steps of each member of a group took: for the server, not for history.nfdt


def parse_statistics(text: str) -> dict[str, Any]:
    """A worker's totals; what cannot be read counts as nothing, statistics never fail a job."""
    if not text or len(text) > MAX_STATISTICS_BYTES:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def new_decisions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a worker decided about its codecs between two of its reports; nothing where they cannot be read."""

    def decisions(report: Mapping[str, Any]) -> list[dict[str, Any]]:
        codecs = report.get("codecs")
        found = codecs.get("decisions") if isinstance(codecs, dict) else None
        told = found if isinstance(found, list) else []
        return [d for d in told if isinstance(d, dict) and isinstance(d.get("at_push"), int)]

    known = max((decision["at_push"] for decision in decisions(before)), default=0)
    return [decision for decision in decisions(after) if decision["at_push"] > known]


def merge_statistics(
    workers: Mapping[str, Mapping[str, Any]], shards: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    """One row per worker, in the order of ``workers``.

    Args:
        workers: Per worker what the server knows (host, pid, device) and what the worker reported.
        shards: Per shard its counts, with ``workers``: {name: {pushes, duplicates, dropped, staleness}}.

    Returns:
        The workers' rows; ``duplicates`` summed over shards, ``dropped`` of the shard that dropped most, ``staleness``
        of the shards where the worker reported none (it died before its first report).
    """
    merged: dict[str, dict[str, Any]] = {}
    for name, row in workers.items():
        counts = [shard.get("workers", {}).get(name, {}) for shard in shards]
        total = {**row, "duplicates": sum(int(c.get("duplicates", 0)) for c in counts)}
        total.pop(RECENT, None)
        if dropped := [int(c["dropped"]) for c in counts if "dropped" in c]:
            total["dropped"] = max(dropped)  # the worker cannot tell a push that was dropped from one that came twice
        if "staleness" not in total and counts:
            total["staleness"] = dict(counts[0].get("staleness", {}))
        merged[name] = total
    return merged
