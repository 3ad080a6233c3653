"""Jobs that an earlier server left behind: which of them go on, and from which state."""

from __future__ import annotations

import logging

from nfdt.core.errors import JobFailed, NfdtError
from nfdt.core.jobs import admission
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.lifecycle import ACTIVE, RESTARTED
from nfdt.core.jobs.resuming import last_state
from nfdt.core.jobs.store import JobRecord, JobStore
from nfdt.core.specs.job import JobSpec, parse_job

_log = logging.getLogger(__name__)

MOST_RESTARTS = 3  # consecutive number of restarts without the end of an epoch, after which a job fails


def take_up(store: JobStore, artifacts: ArtifactStore) -> list[str]:
    """Queue the jobs that an earlier server left behind, and fail those that cannot go on.

    Returns:
        The jobs to run, oldest first.
    """
    found = []
    for record in store.jobs(ACTIVE):
        try:
            if record.state == "running":
                _take_up(record, store, artifacts)
            elif record.state != "queued":
                store.requeue(record.job_id, RESTARTED)
        except NfdtError as error:
            store.transition(record.job_id, "failed", reason=f"{RESTARTED}: {error}")
        else:
            found.append(record.job_id)
    return found


def _take_up(record: JobRecord, store: JobStore, artifacts: ArtifactStore) -> None:
    """Queue a job that was training: from its state at the end of an epoch, else from its beginning."""
    if store.restarts(record.job_id) >= MOST_RESTARTS:
        raise JobFailed(f"it ended no epoch between {MOST_RESTARTS} restarts, and may be their cause.")
    spec = parse_job(record.spec_json)
    checkpoint = last_state(record, spec)
    if checkpoint is None:
        spec, where = spec.model_copy(update={"attended": False}), "from the beginning"
    else:
        admission.check_artifacts(checkpoint.spec, artifacts)
        before = admission.read_manifest(checkpoint.spec, artifacts)
        program = artifacts.put(checkpoint.manifest(before).to_bytes())
        spec, where = checkpoint.resumed(program, before), f"from the end of epoch {checkpoint.epochs}"
    _queue(record.job_id, spec, where, store)


def _queue(job_id: str, spec: JobSpec, where: str, store: JobStore) -> None:
    store.requeue(job_id, f"{RESTARTED}; training goes on {where}", spec.model_dump_json())
    text = f"The server was restarted: training goes on {where}. What was trained since then is trained again."
    store.append(job_id, "log", {"worker": None, "level": "warning", "text": text})
    _log.info("job %s goes on %s", job_id, where)
