"""Records of a job in the store: events, statistics, checkpoint, result."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.jobserver.outcome import JobOutcome
from nfdt.launch.horovod_log import RingStall, describe

_log = logging.getLogger(__name__)


class JobLog:
    """Writer of the records of one job.

    Args:
        store: Store of jobs and events.
        artifacts: Store of files, where old checkpoints are deleted.
        job_id: The job.
        keep: Artifacts that the job was submitted with; they are never deleted.
    """

    def __init__(self, store: JobStore, artifacts: ArtifactStore, job_id: str, keep: frozenset[str]) -> None:
        self._store, self._artifacts, self._job_id, self._keep = store, artifacts, job_id, keep
        self._unstored: JobOutcome | None = None  # last state of the job, until it is stored
        self._passing = ""

    def begin(self, outcome: JobOutcome) -> None:
        """Store the job's next state."""
        self._store.transition(self._job_id, outcome.state, reason=outcome.reason, error=outcome.error)

    def end(self, outcome: JobOutcome) -> None:
        """Store the job's last state; if that fails now, :meth:`settled` tries again."""
        self._unstored = outcome
        try:
            self.settled()
        except NfdtError:
            _log.exception("job %s: its end could not be stored yet: %s", self._job_id, outcome)

    def settled(self) -> bool:
        """Store the job's last state if it is not stored yet; return True.

        Raises:
            NfdtError: It still cannot be stored.
        """
        if self._unstored is not None:
            try:
                self.begin(self._unstored)
            except UsageError:
                _log.exception("job %s: its end does not follow from its state", self._job_id)
            self._unstored = None
        return True

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event, and update the job's description."""
        self._store.append(self._job_id, kind, dict(data))  # type: ignore[arg-type]
        if kind == "epoch_begin":
            self._store.update(self._job_id, epoch=data["epoch"])
        elif kind in ("progress", "epoch_end"):
            validation = {f"val_{name}": value for name, value in (data.get("val_logs") or {}).items()}
            self._store.update(self._job_id, last_logs_json=json.dumps({**data["logs"], **validation}))

    def write(self, level: str, text: str) -> None:
        """Append a line of the job's log."""
        self.record("log", {"worker": None, "level": level, "text": text})

    def stalled(self, waiting_for: list[str], since_s: float) -> None:
        """Append a ``stalled`` event."""
        self.record("stalled", {"waiting_for": waiting_for, "since_s": since_s})

    def ring_messages(self, stalls: Iterable[RingStall], texts: Iterable[str]) -> None:
        """Append stalls and messages that were found in the log of the job's ring."""
        for stall in stalls:
            self.record("stalled", describe(stall))
        for text in texts:
            self.write("warning", text)

    def workers(self, statistics: Mapping[str, Any]) -> None:
        """Update the statistics of the workers."""
        self._store.update(self._job_id, workers_json=json.dumps(statistics))

    def checkpoint(self, artifact: str, epochs: int) -> None:
        """Store the state after ``epochs`` epochs and delete the previous one."""
        before = self._store.get(self._job_id).checkpoint_artifact
        self._store.update(self._job_id, checkpoint_artifact=artifact, checkpoint_epochs=epochs)
        if before and before != artifact and before not in self._keep:
            self._artifacts.delete(before)

    def passing(self, artifact: str) -> None:
        """Record a state in the middle of an epoch and delete the previous one."""
        before, self._passing = self._passing, artifact
        job = self._store.get(self._job_id)
        if before not in ("", artifact, job.checkpoint_artifact, job.result_artifact, *self._keep):
            self._artifacts.delete(before)

    def result(self, artifact: str, statistics: Mapping[str, Any]) -> None:
        """Store the state at the end of training."""
        self._store.update(self._job_id, result_artifact=artifact)
        self.workers(statistics)
        self.record("result", {"artifact": artifact, "workers": dict(statistics)})
