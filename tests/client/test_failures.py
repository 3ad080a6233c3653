from __future__ import annotations

import builtins
import traceback

import pytest
from nfdt_client.failures import failure_of, rebuild

from nfdt.core.errors import JobCancelled, JobFailed, PolicyRefused, WorkerFailed

ERROR = {
    "module": "builtins",
    "type": "KeyError",
    "message": "'k'",
    "traceback": "File x, line 1",
    "worker": "worker-1",
}


def test_a_built_in_exception_keeps_its_type_and_shows_the_worker():
    error = failure_of("job-1", {"state": "failed", "reason": "r", "error": ERROR})
    assert type(error) is KeyError
    assert isinstance(error.__cause__, WorkerFailed)
    assert "worker-1" in str(error.__cause__)
    assert "File x, line 1" in str(error.__cause__)
    assert "worker-1" in error.__notes__[0]


def test_a_worker_s_error_is_printed_without_internal_frames_and_once_more_at_most():
    frames = "".join(f'  File "/x/site-packages/keras/src/{n}.py", line 1, in f\n    f()\n' for n in range(30))
    trace = f"Traceback (most recent call last):\n{frames}ValueError: odd\n"
    raised = {**ERROR, "type": "ValueError", "message": "odd", "traceback": trace}
    error = failure_of("job-1", {"state": "failed", "error": raised})
    printed = "".join(traceback.format_exception(error))
    assert len(printed.splitlines()) < 14
    assert printed.count("ValueError: odd") == 2


def test_the_user_s_own_exception_becomes_worker_failed():
    error = failure_of("job-1", {"state": "failed", "error": {**ERROR, "module": "script", "type": "Mine"}})
    assert type(error) is WorkerFailed
    assert "Mine: 'k'" in str(error)


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "StopIteration", "print", "NoSuch", "__import__"])
def test_only_ordinary_exceptions_are_rebuilt(name):
    assert rebuild("builtins", name, "m") is None


def test_nothing_is_imported_to_find_a_type(monkeypatch):
    monkeypatch.setattr(builtins, "__import__", None)
    assert rebuild("keras.no_such_module", "Error", "m") is None
    assert rebuild("os", "error", "m") is None


def test_our_own_errors_come_back_as_they_are():
    assert isinstance(rebuild("nfdt.core.errors", "PolicyRefused", "m"), PolicyRefused)


def test_ends_without_an_exception():
    assert isinstance(failure_of("j", {"state": "failed", "reason": "all workers are gone"}), JobFailed)
    assert "by hand" in str(failure_of("j", {"state": "cancelled", "reason": "by hand"}))
    assert isinstance(failure_of("j", {"state": "cancelled"}), JobCancelled)
