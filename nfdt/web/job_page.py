"""Jobs as plain values for the page, and their weights as a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from nfdt.core.errors import NfdtError
from nfdt.core.events import Event
from nfdt.core.jobs.admission import read_manifest
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import JobRecord
from nfdt.core.jobs.runner import QueuePlace
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.work.statistics import split_by_rank
from nfdt.model.program.state import load_state


def describe_job(record: JobRecord, spec: JobSpec, places: Mapping[str, QueuePlace]) -> dict[str, Any]:
    """Return what a list of jobs shows of one; ``places`` holds the places of waiting jobs in the queue."""
    return {
        "job_id": record.job_id,
        "name": record.name or "",
        "model": spec.name,
        "state": record.state,
        "reason": record.reason or "",
        "user": spec.user,
        "script": spec.script,
        "algorithm": spec.algorithm.name,
        "workers": spec.cluster.workers,
        "epoch": record.epoch,
        "epochs": spec.fit.epochs,
        "logs": json.loads(record.last_logs_json or "{}"),
        "submitted_at": record.submitted_at,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "place": places.get(record.job_id, QueuePlace()).number,
    }


def describe_epochs(record: JobRecord, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return metrics of the epochs that have ended, and the seconds from the job's start to each end."""
    began, epochs = record.started_at or record.submitted_at, dict[int, dict[str, Any]]()
    for event in events:
        data, validation = (
            event.data,
            {f"val_{name}": value for name, value in (event.data.get("val_logs") or {}).items()},
        )
        if event.kind == "epoch_end":
            epochs[data["epoch"]] = {"epoch": data["epoch"] + 1, "seconds": event.at - began, "logs": data["logs"]}
        if found := epochs.get(data["epoch"]):
            found["logs"] = {**found["logs"], **validation}
    return list(epochs.values())


def describe_program(record: JobRecord, artifacts: ArtifactStore) -> dict[str, Any]:
    """Return the options of a job, and the variables of its program; none where the program is not stored any more."""
    spec = parse_job(record.spec_json)
    variables: list[tuple[str, tuple[int, ...]]] = []
    try:
        variables = [(slot.name, slot.shape) for slot in read_manifest(spec, artifacts).layout.slots]
    except (NfdtError, KeyError, TypeError, ValueError, AttributeError):
        pass
    return {
        "options": {
            "algorithm": spec.algorithm.model_dump(mode="json", exclude_none=True),
            "cluster": spec.cluster.model_dump(mode="json", exclude_none=True),
            "fit": spec.fit.model_dump(mode="json", exclude_none=True),
        },
        "variables": variables,
        "forecast": spec.forecast.model_dump() if spec.forecast is not None else None,
        "statistics": split_by_rank(json.loads(record.workers_json or "{}")),
    }


def weights_file(record: JobRecord, artifacts: ArtifactStore, state: str) -> IO[bytes]:
    """Return the trainable variables of a state by name, as a temporary ``.npz`` file at its start.

    Raises:
        NfdtError: the program or the state is not stored, or is malformed.
    """
    layout = read_manifest(parse_job(record.spec_json), artifacts).layout
    arrays = layout.unflatten(load_state(artifacts.path(state)).weights)
    file = tempfile.TemporaryFile()
    named: dict[str, Any] = {slot.name: array for slot, array in zip(layout.slots, arrays, strict=True)}
    np.savez(file, **named)
    file.seek(0)
    return file
