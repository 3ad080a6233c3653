"""What a rank raised, on its way to the script: a file that rank 0 and the job server look for."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from google.protobuf import json_format

from hfdt.runtime.attendance import Attendance, failure_of
from nfdt.core.host.private_files import replacing
from nfdt.core.wire import workers_pb2 as pb

logger = logging.getLogger(__name__)

LOOK_S = 0.3


def failure_file(directory: Path, rank: int) -> Path:
    """Where a rank leaves what it raised."""
    return directory / f"failure-{rank}.json"


def leave_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Write down what this rank raised, for rank 0 and for the server; appears whole or not at all."""
    message = failure_of("", error, rank)
    value = json_format.MessageToDict(message, preserving_proto_field_name=True)
    try:
        with replacing(failure_file(directory, rank)) as file:
            file.write(json.dumps(value).encode())
    except OSError as problem:
        logger.warning("rank %d could not write down why it failed: %s", rank, problem)


class FailureWatch:
    """Rank 0, or who leads instead, looks for what other ranks left behind and tells the server, once.

    Args:
        directory: The ring's.
        attendance: At the server.
        own: The rank that tells what it raised itself; None: any of them may have been.

    Attributes:
        told: Set when it has.
    """

    def __init__(self, directory: Path, attendance: Attendance, own: int | None = 0) -> None:
        self._directory, self._attendance = directory, attendance
        self._own = None if own is None else failure_file(directory, own)
        self.told = threading.Event()
        threading.Thread(target=self._look, name="failures", daemon=True).start()

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            try:
                if self._tell():
                    self.told.set()
                    return
            except (OSError, ValueError, json_format.ParseError) as error:  # of one file, at one moment: look again
                logger.warning("what a rank left behind could not be read: %s", error)

    def _tell(self) -> bool:
        for path in sorted(self._directory.glob("failure-*.json"), key=lambda p: p.stat().st_mtime):
            if self._attendance.job_id and path != self._own:
                failed = json_format.ParseDict(json.loads(path.read_text()), pb.SlotFailed())
                failed.job_id = self._attendance.job_id
                self._attendance.say("worker", failed=failed)
                return True
        return False
