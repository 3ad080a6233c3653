"""Machines of a server as plain values for the page: their slots, jobs, processors, memory and GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from nfdt.core.wire import jobs_pb2 as pb


def describe_machines(slots: Sequence[pb.SlotDescription]) -> list[dict[str, Any]]:
    """Return the machines with slots, by name; what the whole machine uses is what its slots have last reported."""
    machines = defaultdict[str, list[pb.SlotDescription]](list)
    for slot in slots:
        machines[slot.host].append(slot)
    return [_describe(host, found) for host, found in sorted(machines.items())]


def _describe(host: str, slots: Sequence[pb.SlotDescription]) -> dict[str, Any]:
    roles, reports = Counter(slot.role for slot in slots), [slot.usage for slot in slots if slot.usage.total_bytes]
    gpus = {gpu.uuid: gpu for usage in reports for gpu in usage.gpus}  # slots may share one
    uses = [gpu.use for gpu in gpus.values() if gpu.HasField("use")]
    return {
        "host": host,
        "workers": roles["worker"],
        "shards": roles["shard"],
        "free": sum(not slot.job_id and not slot.away for slot in slots),
        "away": sum(slot.away for slot in slots),
        "jobs": sorted({slot.job_id for slot in slots if slot.job_id}),
        "devices": sorted({slot.device for slot in slots if slot.role == "worker"}),
        "cores": max((usage.machine_cores for usage in reports), default=0),
        "busy_cores": sum(usage.busy_cores for usage in reports) / max(len(reports), 1),
        "used_bytes": max((usage.used_bytes for usage in reports), default=0),
        "total_bytes": max((usage.total_bytes for usage in reports), default=0),
        "gpus": len(gpus),
        "gpu_use": sum(uses) / len(uses) if uses else None,
        "gpu_used_bytes": sum(gpu.memory_bytes for gpu in gpus.values()),
        "gpu_total_bytes": sum(gpu.total_bytes for gpu in gpus.values()),
    }
