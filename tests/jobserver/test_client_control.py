"""What clients have said: which epochs may begin, what is set, and whether anybody is still there."""

from __future__ import annotations

import pytest

from nfdt.core.errors import UsageError
from nfdt.jobserver.client_control import Wishes


def test_an_attended_job_begins_what_was_permitted_and_another_one_everything():
    wishes = Wishes(attended=True, unwatched_since=0.0)
    assert not wishes.permits(0)
    wishes.permitted = 3
    assert [wishes.permits(epoch) for epoch in (0, 3, 4)] == [True, True, False]
    wishes.attended = False
    assert wishes.permits(4)


def test_a_stop_is_heard_once():
    wishes = Wishes(attended=True, unwatched_since=0.0)
    assert not wishes.take_stop()
    wishes.stop_training = True
    assert [wishes.take_stop(), wishes.take_stop()] == [True, False]


@pytest.mark.parametrize("rate", [0.0, 0.1, 5.0])
def test_a_learning_rate_is_kept(rate):
    wishes = Wishes(attended=True, unwatched_since=0.0)
    wishes.set_learning_rate(rate)
    assert wishes.learning_rate == rate


@pytest.mark.parametrize("rate", [-0.1, float("inf"), float("nan")])
def test_what_is_no_learning_rate_is_refused(rate):
    wishes = Wishes(attended=True, unwatched_since=0.0, learning_rate=0.1)
    with pytest.raises(UsageError, match=f"learning_rate: expected a number >= 0. Received: {rate}"):
        wishes.set_learning_rate(rate)
    assert wishes.learning_rate == 0.1


def test_a_job_is_abandoned_when_its_last_client_has_been_away_for_long():
    wishes = Wishes(attended=True, unwatched_since=5.0)
    assert not wishes.abandoned(14.9, timeout_s=10.0)
    assert wishes.abandoned(15.0, timeout_s=10.0)
    wishes.watch(+1, 15.0)
    wishes.watch(+1, 16.0)
    assert not wishes.abandoned(100.0, timeout_s=10.0)
    wishes.watch(-1, 100.0)
    assert not wishes.abandoned(200.0, timeout_s=10.0)  # the other one is still there
    wishes.watch(-1, 200.0)
    assert not wishes.abandoned(209.0, timeout_s=10.0)
    assert wishes.abandoned(211.0, timeout_s=10.0)
    wishes.attended = False
    assert not wishes.abandoned(1e9, timeout_s=10.0)
