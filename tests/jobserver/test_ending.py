import threading

import pytest

from nfdt.core.clock import ManualClock
from nfdt.core.errors import JobCancelled, JobFailed, ServerUnreachable, UsageError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.client_control import Wishes
from nfdt.jobserver.outcome import SlotError, outcome_of
from nfdt.jobserver.termination import BLAME_S, Abandoned, Ending

LOST = SlotError("worker-1", pb.SlotFailed(exception_type="ServerUnreachable", message="shard 0 does not answer"))
SHARD = JobFailed("shard-0 is gone")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def ending(clock):
    return Ending(threading.Condition(), clock)


def end(ending, *causes):
    with ending._changed:
        for cause in causes:
            ending.end(cause)


def test_the_first_cause_wins(ending):
    end(ending, ValueError("first"), ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        ending.check()


def test_a_broken_connection_gives_way_to_the_reason(ending):
    end(ending, LOST)
    ending.check()
    end(ending, SHARD)
    with pytest.raises(JobFailed, match="shard-0"):
        ending.check()


def test_a_broken_connection_is_the_cause_when_nothing_explains_it(ending, clock):
    end(ending, LOST)
    clock.advance(BLAME_S)
    with pytest.raises(SlotError, match="worker-1"):
        ending.check()


def test_a_second_broken_connection_does_not_prolong_the_wait(ending, clock):
    end(ending, LOST)
    clock.advance(BLAME_S)
    end(ending, LOST)
    with pytest.raises(SlotError):
        ending.check()


def test_a_stopping_server_abandons_whatever_else_happened(ending):
    end(ending, SHARD, Abandoned())
    with pytest.raises(Abandoned):
        ending.check()


def test_an_unreachable_shard_is_explained_by_its_end(ending):
    end(ending, SHARD)
    assert ending.reason_behind(ServerUnreachable("no answer")) is SHARD
    other = KeyError("x")
    assert ending.reason_behind(other) is other


@pytest.mark.parametrize(
    ("error", "state", "kind"),
    [
        (JobCancelled("enough"), "cancelled", None),
        (JobFailed("gone"), "failed", None),
        (UsageError("bad"), "failed", "UsageError"),
        (KeyError("bug"), "failed", "KeyError"),
        (LOST, "failed", "ServerUnreachable"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_end_has_its_state_and_error(error, state, kind):
    outcome = outcome_of(error)
    assert outcome.state == state
    assert (outcome.error or {}).get("exception_type") == kind


def test_an_attended_job_waits_for_its_client_and_misses_it_after_a_while():
    wishes = Wishes(attended=True, unwatched_since=0.0)
    assert not wishes.permits(0)
    wishes.watch(1, 0.0)
    assert not wishes.abandoned(1000.0, 60.0)
    wishes.watch(-1, 1000.0)
    assert not wishes.abandoned(1059.0, 60.0)
    assert wishes.abandoned(1060.0, 60.0)


def test_a_wish_to_stop_is_heard_once():
    wishes = Wishes(attended=False, unwatched_since=0.0, stop_training=True)
    assert [wishes.take_stop(), wishes.take_stop()] == [True, False]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_learning_rate_is_a_number(value):
    with pytest.raises(UsageError, match="learning_rate"):
        Wishes(attended=False, unwatched_since=0.0).set_learning_rate(value)
