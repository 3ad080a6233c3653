"""Output and spans that the processes of one job send, in the records of the job."""

from __future__ import annotations

import contextlib

from nfdt.core.errors import NotStored, ProtocolError
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.spans import CAPACITY, SPAN
from nfdt.jobserver.job_log import JobLog


class SlotNotes:
    """Writer of these records; any thread may call, also after the end of the job.

    Args:
        store: Store of jobs and events.
        job_id: The job.
        job_log: Log of the job.
    """

    def __init__(self, store: JobStore, job_id: str, job_log: JobLog) -> None:
        self._store, self._job_id, self._job_log = store, job_id, job_log

    def receive(self, process: str, message: pb.SlotMessage) -> None:
        """Write output or spans of a process, as in ``worker-0``.

        Raises:
            ProtocolError: the spans are no records, or too many.
        """
        if message.HasField("output"):
            self._job_log.output(process, message.output.lines)
            return
        spans = message.spans
        if len(spans.records) % SPAN.itemsize or len(spans.records) > CAPACITY * SPAN.itemsize:
            raise ProtocolError(
                f"Spans of {process}: expected at most {CAPACITY} records of {SPAN.itemsize} bytes. "
                f"Received: {len(spans.records)} bytes."
            )
        with contextlib.suppress(NotStored):  # the trace has a gap
            self._store.add_spans(self._job_id, process, spans.records, spans.offset_s, spans.error_s)
