import threading

import pytest

from nfdt.core.clock import ManualClock
from nfdt.core.errors import JobCancelled, JobFailed, ServerUnreachable, UsageError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.client_control import ClientControl
from nfdt.jobserver.outcome import SlotError, outcome_of
from nfdt.jobserver.termination import CAUSE_WAIT_S, ServerStopping, Termination

LOST = SlotError("worker-1", pb.SlotFailed(exception_type="ServerUnreachable", message="shard 0 does not answer"))
SHARD = JobFailed("shard-0 is gone")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def termination(clock):
    return Termination(threading.Condition(), clock)


def end(termination, *causes):
    with termination._changed:
        for cause in causes:
            termination.end(cause)


def test_the_first_cause_wins(termination):
    end(termination, ValueError("first"), ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        termination.check()


def test_a_broken_connection_gives_way_to_the_reason(termination):
    end(termination, LOST)
    termination.check()
    end(termination, SHARD)
    with pytest.raises(JobFailed, match="shard-0"):
        termination.check()


def test_a_broken_connection_is_the_cause_when_nothing_explains_it(termination, clock):
    end(termination, LOST)
    clock.advance(CAUSE_WAIT_S)
    with pytest.raises(SlotError, match="worker-1"):
        termination.check()


def test_a_second_broken_connection_does_not_prolong_the_wait(termination, clock):
    end(termination, LOST)
    clock.advance(CAUSE_WAIT_S)
    end(termination, LOST)
    with pytest.raises(SlotError):
        termination.check()


def test_a_stopping_server_abandons_whatever_else_happened(termination):
    end(termination, SHARD, ServerStopping())
    with pytest.raises(ServerStopping):
        termination.check()


def test_an_unreachable_shard_is_explained_by_its_end(termination):
    end(termination, SHARD)
    assert termination.reason_behind(ServerUnreachable("no answer")) is SHARD
    other = KeyError("x")
    assert termination.reason_behind(other) is other


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


def test_an_interactive_job_waits_for_its_client_and_misses_it_after_a_while():
    control = ClientControl(interactive=True, unwatched_since=0.0)
    assert not control.permits(0)
    control.watch(1, 0.0)
    assert not control.abandoned(1000.0, 60.0)
    control.watch(-1, 1000.0)
    assert not control.abandoned(1059.0, 60.0)
    assert control.abandoned(1060.0, 60.0)


def test_a_request_to_stop_counts_once():
    control = ClientControl(interactive=False, unwatched_since=0.0, stop_training=True)
    assert [control.take_stop(), control.take_stop()] == [True, False]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_learning_rate_is_a_number(value):
    with pytest.raises(UsageError, match="learning_rate"):
        ClientControl(interactive=False, unwatched_since=0.0).set_learning_rate(value)
