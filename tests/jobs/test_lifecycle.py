import pytest

from nfdt.core.errors import UsageError
from nfdt.core.jobs.job_record import ACTIVE, TERMINAL, TRANSITIONS, check_transition, is_terminal


def test_every_state_is_active_or_terminal_and_named_once():
    assert sorted(ACTIVE + TERMINAL) == sorted(TRANSITIONS)


@pytest.mark.parametrize("state", TERMINAL)
def test_a_job_that_has_ended_goes_nowhere(state):
    assert is_terminal(state)
    with pytest.raises(UsageError, match="has ended"):
        check_transition("j", state, "running")


@pytest.mark.parametrize("state", ACTIVE)
def test_every_active_job_can_fail_and_be_cancelled(state):
    check_transition("j", state, "failed")
    check_transition("j", state, "cancelled")


def test_a_queued_job_does_not_succeed():
    with pytest.raises(UsageError, match="starting"):
        check_transition("j", "queued", "succeeded")
