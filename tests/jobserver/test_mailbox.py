"""Messages of a job: one at a time, with waiting threads, timers, slow calls, and the reason for the job's end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest

from nfdt.core.clock import SystemClock
from nfdt.core.errors import JobCancelled, JobFailed, ServerUnreachable, UsageError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_core import ClientControl
from nfdt.jobserver.mailbox import CAUSE_WAIT_S, POLL_S, Mailbox, ServerStopping
from nfdt.jobserver.outcome import SlotError, outcome_of
from tests.support.clocks import ManualClock

LOST = SlotError("worker-1", pb.SlotFailed(exception_type="ServerUnreachable", message="shard 0 does not answer"))
SHARD = JobFailed("shard-0 is gone")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def mailbox(clock):
    return Mailbox(clock)


def end(mailbox, *causes):
    for cause in causes:
        mailbox.end(cause)


def test_the_first_cause_wins(mailbox):
    end(mailbox, ValueError("first"), ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        mailbox.check()


def test_a_broken_connection_gives_way_to_the_reason(mailbox):
    end(mailbox, LOST)
    mailbox.check()
    end(mailbox, SHARD)
    with pytest.raises(JobFailed, match="shard-0"):
        mailbox.check()


def test_a_broken_connection_is_the_cause_when_nothing_explains_it(mailbox, clock):
    end(mailbox, LOST)
    clock.advance(CAUSE_WAIT_S)
    with pytest.raises(SlotError, match="worker-1"):
        mailbox.check()


def test_a_second_broken_connection_does_not_prolong_the_wait(mailbox, clock):
    end(mailbox, LOST)
    clock.advance(CAUSE_WAIT_S)
    end(mailbox, LOST)
    with pytest.raises(SlotError):
        mailbox.check()


def test_a_stopping_server_abandons_whatever_else_happened(mailbox):
    end(mailbox, SHARD, ServerStopping())
    with pytest.raises(ServerStopping):
        mailbox.check()


def test_an_unreachable_shard_is_explained_by_its_end(mailbox):
    end(mailbox, SHARD)
    assert mailbox.reason_behind(ServerUnreachable("no answer")) is SHARD
    other = KeyError("x")
    assert mailbox.reason_behind(other) is other


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
    assert [control.pop_stop(), control.pop_stop()] == [True, False]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_learning_rate_is_a_number(value):
    with pytest.raises(UsageError, match="learning_rate"):
        ClientControl(interactive=False, unwatched_since=0.0).set_learning_rate(value)


# ---- messages


def in_threads(count: int, work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_messages_of_many_threads_are_handled_one_at_a_time(mailbox):
    inside, most = [], []

    def message() -> None:
        inside.append(1)
        most.append(len(inside))
        sum(range(1000))
        inside.pop()

    for thread in in_threads(8, lambda: [mailbox.handle(message) for _ in range(50)]):
        thread.join(30)
    assert most == [1] * 400


def test_a_question_is_asked_again_after_each_message(mailbox):
    state, asked, answers = [], threading.Semaphore(0), []

    def question() -> int | None:
        asked.release()
        return len(state) if len(state) > 1 else None

    (waiting,) = in_threads(1, lambda: answers.append(mailbox.wait(question, 30)))
    for number in range(2):
        assert asked.acquire(timeout=30)
        mailbox.handle(lambda number=number: state.append(number))
    waiting.join(30)
    assert answers == [2]


def test_no_is_an_answer_and_none_is_not(mailbox):
    assert mailbox.wait(lambda: False, 30) is False
    assert mailbox.wait(lambda: None, 0) is None


class PausedMailbox(Mailbox):
    """Mailbox whose pauses pass at once; each one may bring a message."""

    def __init__(self, clock: ManualClock, messages: Iterable[Callable[[], object]] = ()) -> None:
        super().__init__(clock)
        self.manual, self.messages, self.pauses = clock, iter(messages), []

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.manual.advance(seconds)
        next(self.messages, lambda: None)()


def test_a_wait_ends_at_its_limit_and_asks_once_a_second_until_then(clock):
    clock.advance(100.0)
    mailbox = PausedMailbox(clock)
    assert mailbox.wait(lambda: None, 2.5) is None
    assert mailbox.pauses == [POLL_S, POLL_S, 0.5]


def test_an_unreachable_shard_is_explained_by_an_end_that_is_reported_later(clock):
    mailbox = PausedMailbox(clock, [lambda: mailbox.end(LOST), lambda: mailbox.end(SHARD)])
    assert mailbox.reason_behind(ServerUnreachable("no answer")) is SHARD


def test_an_error_without_explanation_stays_as_it_is(clock):
    mailbox, error = PausedMailbox(clock), ServerUnreachable("no answer")
    assert mailbox.reason_behind(error) is error
    assert sum(mailbox.pauses) == CAUSE_WAIT_S


def test_a_message_that_fails_fails_its_sender_only(mailbox):
    with pytest.raises(ValueError, match="bad"):
        mailbox.handle(lambda: int("bad"))
    assert mailbox.handle(lambda: 7) == 7
    mailbox.check()


def test_a_message_that_waits_lets_others_be_handled():
    mailbox, state = Mailbox(SystemClock()), []
    (other,) = in_threads(1, lambda: mailbox.handle(lambda: state.append(1)))
    assert mailbox.handle(lambda: mailbox.wait(lambda: state or None, 30)) == [1]
    other.join(30)


# ---- timers and slow calls


def test_timers_run_on_the_thread_of_the_job_only_until_they_end(mailbox):
    called, left = [], [0.5, 0.0, None]
    mailbox.add_timer(lambda: called.append(1) or left.pop(0))
    mailbox.wait(lambda: True, 0)
    mailbox.claim_thread()
    for other in in_threads(2, lambda: mailbox.wait(lambda: True, 0)):
        other.join(30)
    assert called == []
    for _ in range(5):
        mailbox.wait(lambda: True, 0)
    assert len(called) == 3


def test_a_timer_is_added_once(mailbox):
    called = []

    def timer() -> float:
        called.append(1)
        return 1.0

    mailbox.claim_thread()
    mailbox.add_timer(timer)
    mailbox.add_timer(timer)
    mailbox.wait(lambda: True, 0)
    assert called == [1]


def test_a_timer_that_fails_ends_the_job_and_is_not_called_again(mailbox):
    mailbox.claim_thread()
    mailbox.add_timer(lambda: float("bad"))
    mailbox.wait(lambda: True, 0)
    with pytest.raises(ValueError, match="bad"):
        mailbox.check()
    mailbox.cause = None
    mailbox.wait(lambda: True, 0)
    mailbox.check()


def test_timers_and_messages_are_handled_while_a_slow_call_runs():
    mailbox, ticks, ended = Mailbox(SystemClock()), [], threading.Event()
    mailbox.claim_thread()
    mailbox.add_timer(lambda: ticks.append(1) or 0.0)

    def slow() -> int:
        for count in range(2, 5):
            assert mailbox.wait(lambda count=count: len(ticks) >= count or None, 30)
        ended.set()
        return len(ticks)

    assert mailbox.call(slow) >= 3
    assert ended.is_set()


def test_a_slow_call_that_fails_fails_where_it_was_made():
    mailbox = Mailbox(SystemClock())
    mailbox.claim_thread()
    with pytest.raises(ServerUnreachable, match="gone"):
        mailbox.call(lambda: raise_(ServerUnreachable("gone")))


def test_another_thread_makes_its_slow_calls_itself(mailbox):
    assert mailbox.call(threading.get_ident) == threading.get_ident()


def raise_(error: BaseException) -> None:
    raise error
