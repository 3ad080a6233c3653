"""Jobs that lost their server or a part of the weights: which of them go on, and from which state."""

from __future__ import annotations

import json
import logging
from itertools import accumulate, pairwise

from nfdt.core.errors import JobFailed, NfdtError
from nfdt.core.jobs import admission
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import ACTIVE, RESTARTED, JobRecord
from nfdt.core.jobs.store import JobStore
from nfdt.core.jobs.submissions import Checkpoint, stored_states
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.work.artifacts import artifact_names

_log = logging.getLogger(__name__)

MOST_RESTARTS = 3  # consecutive number of restarts without the end of an epoch, after which a job fails


def requeue_unfinished(store: JobStore, artifacts: ArtifactStore) -> list[str]:
    """Queue the jobs that an earlier server left behind, and fail those that cannot go on.

    Returns:
        The jobs to run, oldest first.
    """
    return [record.job_id for record in store.jobs(ACTIVE) if requeue(record, store, artifacts, RESTARTED)]


def requeue(record: JobRecord, store: JobStore, artifacts: ArtifactStore, why: str) -> bool:
    """Queue a job again whose run was broken off; return whether there is something left to run.

    A job that cannot go on fails; one whose epochs are all trained ends with its result.
    """
    spec = parse_job(record.spec_json)
    if record.state == "queued":  # its event shows the client that its requests are forgotten
        store.requeue(record.job_id, None, epoch=spec.fit.initial_epoch)
        return True
    try:
        if store.restarts(record.job_id) >= MOST_RESTARTS:
            raise JobFailed(f"it ended no epoch between {MOST_RESTARTS} restarts, and may be their cause.")
        if record.state != "running":
            store.requeue(record.job_id, why, epoch=spec.fit.initial_epoch)
            return True
        if record.checkpoint_artifact and (record.checkpoint_epochs or 0) >= spec.fit.epochs:
            _succeed(record, record.checkpoint_artifact, store)
            return False
        _requeue_trained(record, spec, store, artifacts, why)
    except NfdtError as error:
        store.transition(record.job_id, "failed", reason=f"{why}: {error}")
        return False
    return True


def _succeed(record: JobRecord, state: str, store: JobStore) -> None:
    store.update(record.job_id, result_artifact=state)
    workers = json.loads(record.workers_json or "{}")
    store.append(record.job_id, "result", {"artifact": state, "workers": workers})
    store.transition(record.job_id, "succeeded")


def _requeue_trained(record: JobRecord, spec: JobSpec, store: JobStore, artifacts: ArtifactStore, why: str) -> None:
    """Queue a job that was training, from its newest intact state or else from its beginning."""
    states = [state for state in stored_states(record, spec, fed=True) if _is_intact(state, artifacts)]
    if damaged := [name for name in sorted(artifact_names(spec)) if not artifacts.intact(name)]:
        raise JobFailed(f"{len(damaged)} of its artifacts are damaged or gone, first {damaged[0]}. Submit it again.")
    if not states:
        where = "from the beginning"
    else:
        admission.check_artifacts(states[0].spec, artifacts)
        before = admission.read_manifest(states[0].spec, artifacts)
        spec, where = states[0].resume(before, artifacts), states[0].where
        fit = spec.fit.model_copy(update={"trained": _trained(record, states[0], store)})
        spec = spec.model_copy(update={"fit": fit})
    going_on = f"training goes on {where}"
    store.requeue(record.job_id, f"{why}; {going_on}", spec.model_dump_json(), epoch=spec.fit.initial_epoch)
    text = f"{why[0].upper()}{why[1:]}: {going_on}. What was trained since then is trained again."
    store.append(record.job_id, "log", {"worker": None, "level": "warning", "text": text})
    _log.info("job %s goes on %s", record.job_id, where)


def _trained(record: JobRecord, state: Checkpoint, store: JobStore) -> dict[str, int]:
    """Return the samples that a state contains, divided among the workers as those of their last reports are."""
    begun = state.begun.samples if state.begun is not None else 0
    samples = store.samples_of(record.job_id, state.epochs) + begun
    reported = {name: int(row["samples"]) for name, row in json.loads(record.workers_json or "{}").items()}
    ends = accumulate(reported.values(), initial=0)
    shares = pairwise(samples * end // max(1, sum(reported.values())) for end in ends)
    return {name: end - begin for name, (begin, end) in zip(reported, shares, strict=True)}


def _is_intact(state: Checkpoint, artifacts: ArtifactStore) -> bool:
    if damaged := [name for name in state.artifacts if not artifacts.intact(name)]:
        _log.warning("the state %s is passed over: %s is damaged or gone", state.where, damaged[0])
    return not damaged
