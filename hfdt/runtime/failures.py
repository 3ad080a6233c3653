"""Exchange of a rank's exception through a file that rank 0 and the job server watch."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from google.protobuf import json_format

from hfdt.runtime.slot_connection import SlotConnection, failure_of
from nfdt.core.host.private_files import replacing
from nfdt.core.wire import workers_pb2 as pb

logger = logging.getLogger(__name__)

LOOK_S = 0.3


def failure_file(directory: Path, rank: int) -> Path:
    """Return the path of the file with the exception of a rank."""
    return directory / f"failure-{rank}.json"


def leave_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Write the exception of this rank to its file, atomically."""
    message = failure_of("", error, rank)
    value = json_format.MessageToDict(message, preserving_proto_field_name=True)
    try:
        with replacing(failure_file(directory, rank)) as file:
            file.write(json.dumps(value).encode())
    except OSError as problem:
        logger.warning("rank %d could not write down why it failed: %s", rank, problem)


class FailureWatch:
    """Watcher that reports the failure of a rank to the server, once; runs on the leader.

    Args:
        directory: Directory of the ring.
        connection: Registration at the server.
        own: Rank that reports its own failure; None for none.

    Attributes:
        reported: Set when a failure has been reported.
    """

    def __init__(self, directory: Path, connection: SlotConnection, own: int | None = 0) -> None:
        self._directory, self._connection = directory, connection
        self._own = None if own is None else failure_file(directory, own)
        self.reported = threading.Event()
        threading.Thread(target=self._look, name="failures", daemon=True).start()

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            try:
                if self._report():
                    self.reported.set()
                    return
            except (OSError, ValueError, json_format.ParseError) as error:  # of one file, at one moment: retry
                logger.warning("what a rank left behind could not be read: %s", error)

    def _report(self) -> bool:
        for path in sorted(self._directory.glob("failure-*.json"), key=lambda p: p.stat().st_mtime):
            if self._connection.job_id and path != self._own:
                failed = json_format.ParseDict(json.loads(path.read_text()), pb.SlotFailed())
                failed.job_id = self._connection.job_id
                self._connection.send("worker", failed=failed)
                return True
        return False
