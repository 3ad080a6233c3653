"""Records of a job in the store: events, statistics, checkpoint, result, output and spans of its processes."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from nfdt.core.clock import Clock
from nfdt.core.errors import NotStored, ProtocolError, UsageError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import JobState
from nfdt.core.jobs.store import JobStore
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.specs.job import EpochProgress
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.messages import MOST_LINES, readable_lines
from nfdt.core.work.spans import CAPACITY, SPAN
from nfdt.jobserver.outcome import JobOutcome

_log = logging.getLogger(__name__)

LIMIT_S = 60.0  # time without room on the disk after which a job fails
PAUSE_S = 1.0  # pause between two attempts


class DiskPatience:
    """Time limit for consecutive failures to write, and one warning about them.

    Args:
        job_id: The job, for the warning.
        clock: Clock of the server.
    """

    def __init__(self, job_id: str, clock: Clock) -> None:
        self._job_id, self._clock = job_id, clock
        self._since: float | None = None

    def success(self) -> None:
        """Record that everything is written."""
        self._since = None

    def failure(self, error: NotStored) -> bool:
        """Record a failed attempt and return whether it is the first one."""
        if self._since is not None:
            return False
        self._since = self._clock.now()
        _log.warning("job %s: %s It is tried again for %.0f s.", self._job_id, error, LIMIT_S)
        return True

    def check(self, error: NotStored) -> None:
        """Raise after the time limit.

        Raises:
            NotStored: No attempt has succeeded within the limit; the message is that of ``error``.
        """
        if self._since is not None and self._clock.now() - self._since >= LIMIT_S:
            raise NotStored(f"{error} It was tried again for {LIMIT_S:.0f} s.") from error


class JobLog:
    """Writer of the records of one job; every method may be called from any thread.

    On a full disk the records stay in memory, in order, and are written once there is room: by the next record, or by
    :meth:`retry`.

    Args:
        store: Store of jobs and events.
        artifacts: Store of files, where old checkpoints are deleted.
        job_id: The job.
        keep: Artifacts that the job was submitted with; they are never deleted.
        clock: Clock of the server.
    """

    def __init__(
        self, store: JobStore, artifacts: ArtifactStore, job_id: str, keep: frozenset[str], clock: Clock
    ) -> None:
        self._store, self._artifacts, self._job_id, self._keep = store, artifacts, job_id, keep
        self._passing = ""
        self._workers_json = ""
        self._printed: Counter[str] = Counter()  # lines of each worker
        self._lock = threading.Lock()
        self._unwritten: deque[Callable[[], object]] = deque()
        self._patience = DiskPatience(job_id, clock)

    def _write(self, *writes: Callable[[], object]) -> None:
        """Execute transactions after those that are still unwritten."""
        with self._lock:
            self._unwritten.extend(writes)
            with contextlib.suppress(NotStored):
                self._write_all()

    def _write_all(self) -> None:
        while self._unwritten:
            write = self._unwritten.popleft()
            try:
                write()
            except NotStored as error:
                self._unwritten.appendleft(write)
                self._patience.failure(error)
                raise
        self._patience.success()

    def retry(self) -> None:
        """Write what found no room before.

        Raises:
            NotStored: There has been no room for too long: the job must fail.
        """
        try:
            self.flush()
        except NotStored as error:
            self._patience.check(error)

    def flush(self) -> None:
        """Write what found no room before.

        Raises:
            NotStored: There is still no room.
        """
        with self._lock:
            self._write_all()

    def enter(self, state: JobState) -> None:
        """Store the job's next state."""
        self._write(partial(self._transition, JobOutcome(state), self._store.now()))

    def _transition(self, outcome: JobOutcome, at: float) -> None:
        self._store.transition(self._job_id, outcome.state, reason=outcome.reason, error=outcome.error, at=at)

    def end(self, outcome: JobOutcome | None) -> None:
        """Store the job's last state, if it has one yet; if there is no room now, the scheduler tries again."""
        self._write(*([] if outcome is None else [partial(self._end, outcome, self._store.now())]))

    def _end(self, outcome: JobOutcome, at: float) -> None:
        try:
            self._transition(outcome, at)
        except UsageError:
            _log.exception("job %s: its end does not follow from its state", self._job_id)

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event, and update the job's description."""
        event: tuple[Any, ...] = (kind, dict(data), self._store.now())
        writes: list[Callable[[], object]] = [partial(self._store.append, self._job_id, *event)]
        if kind == "epoch_begin":
            writes.append(self._update(epoch=data["epoch"]))
        elif kind in ("progress", "epoch_end"):
            validation = {f"val_{name}": value for name, value in (data.get("val_logs") or {}).items()}
            writes.append(self._update(last_logs_json=json.dumps({**data["logs"], **validation})))
        self._write(*writes)

    def _update(self, **facts: Any) -> Callable[[], object]:
        return partial(self._store.update, self._job_id, **facts)

    def write(self, level: str, text: str) -> None:
        """Append a line of the job's log."""
        self.record("log", {"worker": None, "level": level, "text": text})

    def output(self, worker: str, lines: Iterable[pb.OutputLine]) -> None:
        """Append lines that a worker, a shard or a rank has printed; those above a limit are dropped."""
        for level, text in readable_lines(lines):
            with self._lock:
                self._printed[worker] += 1
                if self._printed[worker] > 2 * MOST_LINES:  # a process that was lost has sent some
                    return
            self.record("log", {"worker": worker, "level": level, "text": text})

    def write_message(self, process: str, message: pb.SlotMessage) -> None:
        """Write the output or the spans of a process, also after the end of the job.

        Args:
            process: Name of the process, as ``worker-0``.
            message: Message with its output or spans.

        Raises:
            ProtocolError: The spans are no records, or too many.
        """
        if message.HasField("output"):
            self.output(process, message.output.lines)
            return
        spans = message.spans
        if len(spans.records) % SPAN.itemsize or len(spans.records) > CAPACITY * SPAN.itemsize:
            raise ProtocolError(
                f"Spans of {process}: expected at most {CAPACITY} records of {SPAN.itemsize} bytes. "
                f"Received: {len(spans.records)} bytes."
            )
        with contextlib.suppress(NotStored):  # the trace has a gap
            self._store.add_spans(self._job_id, process, spans.records, spans.offset_s, spans.error_s)

    def stalled(self, waiting_for: list[str], since_s: float) -> None:
        """Append a ``stalled`` event."""
        self.record("stalled", {"waiting_for": waiting_for, "since_s": since_s})

    def workers(self, statistics: Mapping[str, Any]) -> None:
        """Update the statistics of the workers."""
        self._write(self._update(workers_json=json.dumps(statistics)))

    def workers_so_far(self, statistics: Mapping[str, Any]) -> None:
        """Update the statistics of the workers unless they are unchanged, or the disk is full."""
        text = json.dumps(statistics)
        with self._lock:
            if self._unwritten or text == self._workers_json:
                return
        self._workers_json = text
        self._write(self._update(workers_json=text))

    def checkpoint(self, artifact: str, epochs: int, callbacks: CallbacksSpec | None = None) -> None:
        """Store the state after ``epochs`` epochs, and the callbacks with it; delete what no job needs any more.

        Args:
            artifact: The state.
            epochs: Number of epochs that it contains.
            callbacks: Callbacks of a detached job; None: unchanged.
        """
        self._write(partial(self._checkpoint, artifact, epochs, callbacks))

    def _checkpoint(self, artifact: str, epochs: int, callbacks: CallbacksSpec | None) -> None:
        before = self._store.get(self._job_id)
        facts: dict[str, Any] = {} if callbacks is None else {"callbacks_json": callbacks.model_dump_json()}
        self._store.update(self._job_id, checkpoint_artifact=artifact, checkpoint_epochs=epochs, **facts)
        kept = before.kept if callbacks is None else set(callbacks.kept.values())
        states = {*filter(None, [before.checkpoint_artifact]), *before.kept}
        for name in states - kept - {artifact} - self._keep:
            self._artifacts.delete(name)

    def needed(self) -> set[str]:
        """Return the artifacts that the job was submitted with, and its stored states but that of its snapshot.

        Raises:
            NotStored: There is no room for what must be written before.
        """
        self.flush()
        job = self._store.get(self._job_id)
        names = (self._passing, job.checkpoint_artifact, job.result_artifact, *job.kept)
        return {*self._keep, *(name for name in names if name)}

    def snapshot(self, artifact: str, progress: EpochProgress | None, records: str) -> None:
        """Store the state of the shards in an epoch, of which it contains a part.

        Raises:
            NotStored: There is no room; the job can do without.
        """
        self.flush()
        text = progress.model_copy(update={"records": records}).model_dump_json() if progress is not None else None
        self._store.update(self._job_id, snapshot_artifact=artifact or None, snapshot_json=text)

    def passing(self, artifact: str) -> None:
        """Record a state in the middle of an epoch and delete the previous one."""
        before, self._passing = self._passing, artifact
        with contextlib.suppress(NotStored):  # a checkpoint that is still unwritten may be the same artifact
            if before and before not in self.needed():
                self._artifacts.delete(before)

    def result(self, artifact: str, statistics: Mapping[str, Any], method: str) -> None:
        """Store the state at the end of training, or the answers of a job of another ``method`` than ``fit``."""
        self._write(self._update(result_artifact=artifact))
        self.workers(statistics)
        self.record("result", {"artifact": artifact, "method": method, "workers": dict(statistics)})
