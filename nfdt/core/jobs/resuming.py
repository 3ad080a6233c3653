"""Specification of a job that goes on from the last stored state of another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nfdt.core.errors import UsageError
from nfdt.core.jobs.job_record import JobRecord
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.specs.job import EpochProgress, JobSpec, parse_job
from nfdt.model.program.manifest import Manifest


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
        """Description of the moment of the state."""
        if self.begun is None or not self.begun.samples:
            return f"from the end of epoch {self.epochs}" if self.epochs else "from the beginning"
        return f"after {self.begun.samples} samples of epoch {self.epochs + 1}"

    def manifest(self, before: Manifest) -> Manifest:
        """Return the job's manifest with this state as the initial one."""
        return before.with_state(self.state)

    def resumed(self, program: str, before: Manifest) -> JobSpec:
        """Return the specification with which the job trains the remaining epochs.

        Args:
            program: Artifact of :meth:`manifest`.
            before: Manifest of the job before.
        """
        kept = set(self.spec.artifacts) - {self.spec.program, before.state}
        fit = self.spec.fit.model_copy(update={"initial_epoch": self.epochs, "begun": self.begun})
        artifacts = tuple(sorted({*kept, program, self.state}))
        changes: dict[str, Any] = {"artifacts": artifacts, "program": program, "fit": fit}
        if self.callbacks is not None:
            changes["callbacks"] = self.callbacks
        return self.spec.model_copy(update=changes)


def checkpoint_of(record: JobRecord) -> Checkpoint:
    """Return the checkpoint from which a job can go on.

    Raises:
        UsageError: The job has not ended or has succeeded, left no state, or its data came from its script.
    """
    if record.state not in ("failed", "cancelled"):
        raise UsageError(
            f"Job {record.job_id}: expected a job that failed or was cancelled. Received: one that is {record.state}."
        )
    states = stored_states(record, parse_job(record.spec_json))
    if not states:
        raise UsageError(
            f"Job {record.job_id}: expected a state at the end of an epoch. Received: none, because the job ended in "
            "its first epoch. Submit it again."
        )
    return states[0]


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
