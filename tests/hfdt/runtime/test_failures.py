"""Transfer of a rank's exception to the server."""

import queue
import stat

import pytest

from hfdt.runtime import slot_connection
from hfdt.runtime.slot_connection import failure_file, leave_failure, watch_failures

TIMEOUT_S = 60


class FakeConnection:
    """Connection that keeps the failures it sends in ``sent``."""

    def __init__(self):
        self.job_id = "job-1"
        self.sent = queue.SimpleQueue()

    def send(self, role, **message):
        self.sent.put(message["failed"])


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(slot_connection, "LOOK_S", 0.01)


def test_the_exception_of_another_rank_is_reported_once_and_kept_private(tmp_path):
    connection = FakeConnection()
    reported = watch_failures(tmp_path, connection)
    leave_failure(tmp_path, 2, ValueError("no more rows"))
    failed = connection.sent.get(timeout=TIMEOUT_S)
    assert (failed.job_id, failed.failed_in, failed.message) == ("job-1", "rank-2", "no more rows")
    assert reported.wait(TIMEOUT_S)
    assert stat.S_IMODE(failure_file(tmp_path, 2).stat().st_mode) == 0o600


def test_a_file_that_cannot_be_read_does_not_end_the_watch(tmp_path, monkeypatch):
    looked = queue.SimpleQueue()
    monkeypatch.setattr(slot_connection.logger, "warning", lambda *_: looked.put(None))
    failure_file(tmp_path, 1).write_text("{")
    connection = FakeConnection()
    watch_failures(tmp_path, connection)
    looked.get(timeout=TIMEOUT_S)
    failure_file(tmp_path, 1).unlink()
    leave_failure(tmp_path, 2, ValueError("no more rows"))
    assert connection.sent.get(timeout=TIMEOUT_S).failed_in == "rank-2"
