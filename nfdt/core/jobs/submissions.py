"""Submission of jobs: new jobs, jobs that continue another one, and jobs that a script finds again by name."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from dataclasses import dataclass, field, replace

from nfdt.core.errors import UsageError
from nfdt.core.jobs import admission
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import JobRecord, Naming
from nfdt.core.jobs.names import Identity, check_name, differences, identity_of, other_program
from nfdt.core.jobs.rights import AuditLog, Holder
from nfdt.core.jobs.runner import JobRunner
from nfdt.core.jobs.store import JobStore
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.specs.job import EpochProgress, JobSpec, parse_job
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """Stored state of a job that did not succeed.

    Attributes:
        spec: Specification of the job.
        state: Artifact of the state.
        epochs: Number of epochs whose training it contains.
        begun: The part of the next epoch that it contains; None: nothing.
        callbacks: Callbacks of a detached job after these epochs; None: there are none, or no epoch has ended.
    """

    spec: JobSpec
    state: str
    epochs: int
    begun: EpochProgress | None = None
    callbacks: CallbacksSpec | None = None

    @property
    def artifacts(self) -> set[str]:
        """Names of the artifacts that are a part of it."""
        kept = self.callbacks.kept.values() if self.callbacks is not None else ()
        return {self.state, *kept, *filter(None, [self.begun.records if self.begun is not None else ""])}

    @property
    def where(self) -> str:
        """Position in the training at which the state was stored, for messages."""
        if self.begun is None or not self.begun.samples:
            return f"from the end of epoch {self.epochs}" if self.epochs else "from the beginning"
        return f"after {self.begun.samples} samples of epoch {self.epochs + 1}"

    def resume(self, before: Manifest, artifacts: ArtifactStore) -> JobSpec:
        """Return the specification with which the job trains the remaining epochs; its new program is stored.

        Args:
            before: Manifest of the job so far.
            artifacts: Takes the program, whose initial state is this one.
        """
        program = artifacts.put(before.replaced(state=self.state).to_bytes())
        kept = set(self.spec.artifacts) - {self.spec.program, before.state}
        return self.spec.model_copy(
            update={
                "artifacts": tuple(sorted({*kept, program, self.state})),
                "program": program,
                "fit": self.spec.fit.model_copy(update={"initial_epoch": self.epochs, "begun": self.begun}),
                "callbacks": self.callbacks or self.spec.callbacks,
            }
        )


def stored_states(record: JobRecord, spec: JobSpec, *, fed: bool = False) -> list[Checkpoint]:
    """Return the stored states of a job, newest first; none before the first one.

    Args:
        record: The job.
        spec: Its specification.
        fed: Whether a client feeds the remaining epochs.

    Raises:
        UsageError: The job's data came from its script, or all epochs are trained.
    """
    if spec.train.kind == "stream" and not fed:
        raise UsageError(
            f"Job {record.job_id}: expected a job whose workers read the data. Received: one that was fed by its "
            "script. Run the script again."
        )
    states, epochs = [], record.checkpoint_epochs or 0
    if epochs >= spec.fit.epochs:
        raise UsageError(f"Job {record.job_id}: all of its {spec.fit.epochs} epochs are trained. Nothing is left.")
    begun = EpochProgress.model_validate_json(record.snapshot_json) if record.snapshot_json else None
    callbacks = CallbacksSpec.model_validate_json(record.callbacks_json) if record.callbacks_json else None
    if record.snapshot_artifact and begun is not None and begun.epoch >= epochs and spec.train.kind == "arrays":
        states.append(Checkpoint(spec, record.snapshot_artifact, begun.epoch, begun, callbacks))
    if record.checkpoint_artifact and epochs:
        states.append(Checkpoint(spec, record.checkpoint_artifact, epochs, None, callbacks))
    return states


@dataclass(frozen=True)
class SubmittingClient:
    """Client that submits a job.

    Attributes:
        holder: Holder of the token that came with the call.
        peer: Address of the client.
        session: Client session; "" for a job without one.
    """

    holder: Holder
    peer: str
    session: str = ""


@dataclass(eq=False)
class Submissions:
    """Checks and queues jobs.

    Attributes:
        store: Jobs and events.
        artifacts: Uploaded and produced files.
        runner: Runs the jobs.
        audit: Log of the users' actions.
        allow_code: Whether jobs may carry pickled code.
        limits: Limits of one client.
        admitting: Held from the check of quotas and names until the job is stored, so that two calls cannot both pass.
    """

    store: JobStore
    artifacts: ArtifactStore
    runner: JobRunner
    audit: AuditLog
    allow_code: bool
    limits: admission.Limits
    admitting: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, spec: JobSpec, by: SubmittingClient, name: str = "") -> pb.SubmitReply:
        """Queue a job; if the owner has a job of this name, go on with that one.

        Raises:
            UsageError: The job is refused, or the job of this name is another program.
            JobTaken: Another client is attached to the job of this name.
        """
        manifest = self._check(spec)
        with self.admitting:
            if not name:
                return self._add(spec, by, Naming())
            identity = identity_of(spec, manifest)
            before = self.store.named(by.holder.owner, check_name(name))
            if before is not None and before.state not in ("failed", "cancelled"):
                return self._attach(before, name, identity, by)
            return self._begin_named(spec, manifest, by, Naming(name, json.dumps(identity)), before)

    def resume(self, record: JobRecord, by: SubmittingClient) -> pb.SubmitReply:
        """Queue a detached job that continues another one from its last stored state, and takes its name.

        Raises:
            UsageError: The job has not ended or has succeeded, left no state, or its data came from its script.
        """
        if record.state not in ("failed", "cancelled"):
            raise UsageError(
                f"Job {record.job_id}: expected a job that failed or was cancelled. "
                f"Received: one that is {record.state}."
            )
        states = stored_states(record, parse_job(record.spec_json))
        if not states:
            raise UsageError(
                f"Job {record.job_id}: expected a state at the end of an epoch. Received: none, because the job ended "
                "in its first epoch. Submit it again."
            )
        checkpoint = states[0]
        admission.check_artifacts(checkpoint.spec, self.artifacts)
        resumed = checkpoint.resume(admission.read_manifest(checkpoint.spec, self.artifacts), self.artifacts)
        spec = resumed.model_copy(update={"attended": False})
        self._check(spec)
        naming = (
            Naming(record.name, record.identity_json, record.job_id, checkpoint.epochs) if record.name else Naming()
        )
        with self.admitting:
            reply = self._add(spec, by, naming)
        _log.info("job %s goes on from epoch %d of job %s", reply.job_id, checkpoint.epochs, record.job_id)
        return reply

    def _check(self, spec: JobSpec) -> Manifest:
        if spec.code and not self.allow_code:  # before any file of it is read
            admission.check_code(spec, Manifest({}), allow_code=False)
        admission.check_artifacts(spec, self.artifacts)
        manifest = admission.read_manifest(spec, self.artifacts)
        admission.check_code(spec, manifest, allow_code=self.allow_code)
        self.runner.admit(spec, manifest)
        admission.check_versions(spec, self.runner.slot_counts().versions)
        return manifest

    def _add(self, spec: JobSpec, by: SubmittingClient, naming: Naming) -> pb.SubmitReply:
        """Queue a job that has passed all checks but the quotas."""
        job_id, owner = f"job-{secrets.token_hex(5)}", by.holder.owner
        admission.check_quotas(spec, len(self.store.active_of(owner)), by.holder, self.limits)
        taken = self.store.add(job_id, spec.model_dump_json(), session=by.session, owner=owner, naming=naming)
        self.audit.write("submit", by.holder, by.peer, job_id, name=spec.name, user=spec.user, script=spec.script)
        _log.info(
            "job %s (%s) submitted by %s with %s at %s: %s, %d workers, %d epochs",
            *(job_id, naming.name or spec.name, spec.user or "-", spec.script or "-", by.peer),
            *(spec.algorithm.name, spec.cluster.workers, spec.fit.epochs - spec.fit.initial_epoch),
        )
        self.runner.submitted(job_id)
        return pb.SubmitReply(job_id=job_id, cursor=taken)

    # ---- names

    def _attach(self, job: JobRecord, name: str, identity: Identity, by: SubmittingClient) -> pb.SubmitReply:
        """Return the job of this name, which waits, runs, or has succeeded."""
        if found := differences(json.loads(job.identity_json or "{}"), identity):
            raise other_program(name, job.job_id, job.state, found)
        self.runner.check_free(job.job_id, by.session)
        _log.info("job %s (%s) is attached to at %s", job.job_id, name, by.peer)
        return pb.SubmitReply(job_id=job.job_id, cursor=self.store.last_cursor(job.job_id))

    def _begin_named(
        self, spec: JobSpec, manifest: Manifest, by: SubmittingClient, naming: Naming, before: JobRecord | None
    ) -> pb.SubmitReply:
        """Queue a job with a name; it continues the failed job of that name if both are the same program."""
        if before is None:
            return self._add(spec, by, naming)
        naming = replace(naming, before=before.job_id)
        found = differences(json.loads(before.identity_json or "{}"), json.loads(naming.identity_json or "{}"))
        checkpoint = None if found else self._last_state(before, spec)
        if checkpoint is not None:
            reply = self._add(
                checkpoint.resume(manifest, self.artifacts), by, replace(naming, epochs=checkpoint.epochs)
            )
            text = f"training goes on {checkpoint.where}"
        else:
            reply = self._add(spec, by, naming)
            why = f"its program differs: {', '.join(found)}" if found else "it left no state"
            text = f"training begins anew, because {why}"
        text = f"Job {before.job_id} of this name is {before.state}: {text}."
        self.store.append(reply.job_id, "log", {"worker": None, "level": "warning", "text": text})
        return reply

    def _last_state(self, before: JobRecord, spec: JobSpec) -> Checkpoint | None:
        """Return the newest intact state of an ended job for a specification of the same program."""
        seed = parse_job(before.spec_json).fit.seed  # the order of the samples of a broken epoch
        spec = spec.model_copy(update={"fit": spec.fit.model_copy(update={"seed": seed})})
        try:
            states = stored_states(before, spec, fed=True)
        except UsageError:  # all epochs are trained
            return None
        intact = (one for one in states if all(map(self.artifacts.intact, one.artifacts)))
        return next(intact, None)
