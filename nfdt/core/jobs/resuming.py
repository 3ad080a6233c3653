"""Specification of a job that goes on from the last stored state of another one."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.core.errors import UsageError
from nfdt.core.jobs.store import JobRecord
from nfdt.core.program.manifest import Manifest
from nfdt.core.specs.job import JobSpec, parse_job


@dataclass(frozen=True)
class Checkpoint:
    """State at the end of an epoch of a job that did not succeed.

    Attributes:
        spec: Specification of the job.
        state: Artifact of the state.
        epochs: Number of epochs whose training it contains.
    """

    spec: JobSpec
    state: str
    epochs: int

    def manifest(self, before: Manifest) -> Manifest:
        """Return the job's manifest with this state as the initial one."""
        return before.with_state(self.state)

    def resumed(self, program: str, before: Manifest) -> JobSpec:
        """Return the specification of a detached job that trains the remaining epochs.

        Args:
            program: Artifact of :meth:`manifest`.
            before: Manifest of the job before.
        """
        kept = set(self.spec.artifacts) - {self.spec.program, before.state}
        fit = self.spec.fit.model_copy(update={"initial_epoch": self.epochs})
        changes = {"artifacts": tuple(sorted({*kept, program, self.state})), "program": program, "fit": fit}
        return self.spec.model_copy(update={**changes, "attended": False})


def checkpoint_of(record: JobRecord) -> Checkpoint:
    """Return the checkpoint from which a job can go on.

    Raises:
        UsageError: The job has not ended or has succeeded, left no state, or its data came from its script.
    """
    if record.state not in ("failed", "cancelled"):
        raise UsageError(
            f"Job {record.job_id}: expected a job that failed or was cancelled. Received: one that is {record.state}."
        )
    checkpoint = last_state(record, parse_job(record.spec_json))
    if checkpoint is None:
        raise UsageError(
            f"Job {record.job_id}: expected a state at the end of an epoch. Received: none, because the job ended in "
            "its first epoch. Submit it again."
        )
    return checkpoint


def last_state(record: JobRecord, spec: JobSpec) -> Checkpoint | None:
    """Return the last stored state of a job; None before the end of its first epoch.

    Raises:
        UsageError: The job's data came from its script, or all epochs are trained.
    """
    if spec.train.kind != "arrays":
        raise UsageError(
            f"Job {record.job_id}: expected a job whose data are on the server. Received: one that was fed by its "
            "script. Run the script again."
        )
    if not record.checkpoint_artifact or not record.checkpoint_epochs:
        return None
    if record.checkpoint_epochs >= spec.fit.epochs:
        raise UsageError(f"Job {record.job_id}: all of its {spec.fit.epochs} epochs are trained. Nothing is left.")
    return Checkpoint(spec, record.checkpoint_artifact, record.checkpoint_epochs)
