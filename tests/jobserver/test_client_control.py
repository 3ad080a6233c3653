"""Requests of clients: permitted epochs, settings, and whether a client is still connected."""

from __future__ import annotations

import pytest

from nfdt.core.errors import JobTaken, UsageError
from nfdt.jobserver.job_core import ClientControl


def test_an_interactive_job_begins_permitted_epochs_and_a_detached_one_all():
    control = ClientControl(interactive=True, unwatched_since=0.0)
    assert not control.permits(0)
    control.permitted = 3
    assert [control.permits(epoch) for epoch in (0, 3, 4)] == [True, True, False]
    control.interactive = False
    assert control.permits(4)


def test_a_stop_is_taken_once():
    control = ClientControl(interactive=True, unwatched_since=0.0)
    assert not control.pop_stop()
    control.stop_training = True
    assert [control.pop_stop(), control.pop_stop()] == [True, False]


@pytest.mark.parametrize("rate", [0.0, 0.1, 5.0])
def test_a_learning_rate_is_kept(rate):
    control = ClientControl(interactive=True, unwatched_since=0.0)
    control.set_learning_rate(rate)
    assert control.learning_rate == rate


@pytest.mark.parametrize("rate", [-0.1, float("inf"), float("nan")])
def test_what_is_no_learning_rate_is_refused(rate):
    control = ClientControl(interactive=True, unwatched_since=0.0, learning_rate=0.1)
    with pytest.raises(UsageError, match=f"learning_rate: expected a number >= 0. Received: {rate}"):
        control.set_learning_rate(rate)
    assert control.learning_rate == 0.1


def test_a_job_is_abandoned_when_its_last_client_has_been_away_for_long():
    control = ClientControl(interactive=True, unwatched_since=5.0)
    assert not control.abandoned(14.9, timeout_s=10.0)
    assert control.abandoned(15.0, timeout_s=10.0)
    control.watch(+1, 15.0)
    control.watch(+1, 16.0)
    assert not control.abandoned(100.0, timeout_s=10.0)
    control.watch(-1, 100.0)
    assert not control.abandoned(200.0, timeout_s=10.0)  # the other client is still connected
    control.watch(-1, 200.0)
    assert not control.abandoned(209.0, timeout_s=10.0)
    assert control.abandoned(211.0, timeout_s=10.0)
    control.interactive = False
    assert not control.abandoned(1e9, timeout_s=10.0)


def test_a_job_belongs_to_one_session_until_all_its_watches_have_ended():
    control = ClientControl(interactive=False, unwatched_since=0.0)
    control.watch(+1, 0.0, "first")
    assert control.interactive  # the callbacks of a client that attaches run from now on
    control.watch(+1, 1.0, "first")  # a client that reconnects is there twice for a while
    control.watch(-1, 2.0, "first")
    with pytest.raises(JobTaken, match="another script"):
        control.watch(+1, 3.0, "second")
    assert control.watchers == 1
    control.check_free("first")
    control.watch(-1, 4.0, "first")
    control.check_free("second")


def test_the_end_of_a_watch_is_counted_whoever_has_the_job_now():
    control = ClientControl(interactive=True, unwatched_since=0.0)
    control.watch(+1, 0.0, "first")
    control.attached["second"] = 1
    control.watch(-1, 1.0, "first")
    assert (control.watchers, control.attached["first"]) == (0, 0)


def test_a_permission_holds_until_a_later_one_and_pauses_its_own_epoch_only():
    control = ClientControl(interactive=True, unwatched_since=0.0)
    control.permit(2, 5)
    control.permit(1, 9)  # late: a newer one has arrived
    assert [control.steps_of(epoch) for epoch in (1, 2, 3)] == [None, 5, None]
    control.permit(2, 7)
    assert control.steps_of(2) == 7
    control.interactive = False
    assert control.steps_of(2) is None
