"""Time limit for the failures of something that is tried again."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from nfdt.core.errors import NotStored, ServerUnreachable
from nfdt.core.work import patience
from nfdt.core.work.patience import Patience

PROBLEM = ServerUnreachable("No answer from h:1.")


class Time:
    """Clock that only pauses advance, and the pauses."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, []
        self.connected = True

    def monotonic(self) -> float:
        return self.now

    def pause(self, left_s: float) -> bool:
        self.pauses.append(left_s)
        self.now += min(left_s, 1.0)
        return self.connected


@pytest.fixture
def clock(monkeypatch) -> Time:
    clock = Time()
    monkeypatch.setattr(patience, "time", clock)
    return clock


def attempts(tried: Patience) -> int:
    count = 1
    while tried.failure():
        count += 1
    return count


def test_attempts_end_at_the_limit_counted_from_the_first_failure(clock):
    assert attempts(Patience(3.0, pause=clock.pause)) == 4
    assert clock.pauses == [3.0, 2.0, 1.0]


def test_the_time_before_a_call_failed_counts_where_it_is_given(clock):
    tried = Patience(3.0, pause=clock.pause)
    assert tried.failure(since=clock.now - 2.0)
    assert tried.left_s == 0.0
    assert not tried.failure(since=clock.now - 2.0)


def test_an_answer_begins_the_limit_anew(clock):
    tried = Patience(3.0, pause=clock.pause)
    assert tried.failure()
    tried.success()
    assert tried.left_s == 3.0
    assert attempts(tried) == 4


@pytest.mark.parametrize(("connected", "left"), [(True, 19.0), (False, 8.0)])
def test_a_connected_call_that_took_long_had_a_server_behind_it(clock, connected, left):
    tried, clock.connected = Patience(20.0, pause=clock.pause, settled_s=5.0), connected
    tried.failure()
    clock.now += 10.0
    tried.failure()
    assert tried.left_s == left


@pytest.mark.parametrize("kind", [ServerUnreachable, NotStored])
def test_the_error_says_how_long_it_was_tried(clock, kind):
    with pytest.raises(kind, match=r"^No room. Gave up after 0 s.$"):
        Patience(0.0, pause=clock.pause).again(kind("No room."))


def test_retries_that_have_become_pointless_end_with_the_problem_alone():
    stopped = threading.Event()
    stopped.set()
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"^No answer from h:1.$"):
        Patience(3600.0, stopped).again(PROBLEM)
    assert time.monotonic() - began < 60


def test_a_warning_says_once_that_attempts_go_on(clock, caplog):
    caplog.set_level(logging.INFO, "nfdt")
    tried = Patience(10.0, pause=clock.pause, report_s=2.0)
    for _ in range(5):
        tried.again(PROBLEM)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["No answer from h:1. Trying again for 10 s, in case it is being restarted."]
    assert len(caplog.records) == 5
