"""Failover as a state machine: reports in any order, at any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.coordinator.failover import Fail, FailoverMachine, Reach, Resume, Seek, Stalled, Start
from tests.support.clocks import ManualClock

LIMIT_S = 40.0
LATE = "No {missing} came within 40 s."
LEADER = ["the next leader"]


def make() -> tuple[FailoverMachine, ManualClock]:
    clock = ManualClock(100.0)
    return FailoverMachine(clock, LIMIT_S, LATE), clock


def serve(machine: FailoverMachine) -> list[object]:
    """Report that nothing is missing and that successors answer; return what the machine asked for."""
    asked = [machine.checked([]) for _ in range(2)]
    return [*asked, machine.called(machine.attempt, answered=True)]


def in_stage(stage: str) -> tuple[FailoverMachine, ManualClock]:
    machine, clock = make()
    stages = ["serving", "placing", "starting", "connecting"]
    if stage == "closed":
        machine.close()
    if stage in stages[1:]:
        machine.lost("shard-0", "it was killed")
    for _ in stages[2 : stages.index(stage) + 1] if stage in stages else ():
        machine.checked([])
    assert machine.stage == stage
    return machine, clock


# ---- one failover


def test_a_lost_part_is_placed_started_called_and_serves():
    machine, clock = make()
    assert machine.serves(0)
    assert machine.lost("shard-0", "it was killed") == Seek()
    assert not machine.serves(0)
    clock.advance(1.0)
    assert machine.checked(LEADER) is None
    assert machine.checked([]) == Start(1)
    clock.advance(2.0)
    assert machine.checked(LEADER) is None
    assert machine.checked([]) == Reach(1)
    assert machine.called(1, answered=True) == Resume(3.0)
    assert machine.serves(1)
    assert not machine.serves(0)


@pytest.mark.parametrize("stage", ["serving", "placing", "starting", "connecting", "closed"])
def test_a_restoration_is_under_way_from_the_loss_until_the_successors_answer(stage):
    machine, _ = in_stage(stage)
    assert machine.restoring == (stage in ("placing", "starting", "connecting"))


@pytest.mark.parametrize("stage", ["placing", "starting", "connecting"])
def test_a_loss_during_a_failover_begins_it_again_but_no_second_one(stage):
    machine, clock = in_stage(stage)
    before = machine.attempt
    clock.advance(5.0)
    assert machine.lost("shard-1", "it was killed as well") is None
    assert machine.stage == "placing"
    assert machine.called(before, answered=True) is None  # the answer of those that are lost by now
    assert serve(machine) == [Start(before + 1), Reach(before + 1), Resume(5.0)]


def test_successors_that_do_not_answer_are_lost():
    machine, _ = in_stage("connecting")
    assert machine.called(1, answered=False) is None
    assert machine.stage == "placing"
    assert serve(machine) == [Start(2), Reach(2), Resume(0.0)]


def test_the_answer_of_an_earlier_attempt_does_not_count():
    machine, _ = in_stage("connecting")
    machine.lost("shard-0", "it was killed again")
    machine.checked([])
    machine.checked([])
    for answered in (True, False):
        assert machine.called(1, answered=answered) is None
        assert machine.stage == "connecting"
    assert machine.called(2, answered=True) == Resume(0.0)


def test_the_next_loss_is_timed_by_itself():
    machine, clock = in_stage("connecting")
    clock.advance(7.0)
    assert machine.called(1, answered=True) == Resume(7.0)
    clock.advance(100.0)
    assert machine.lost("shard-0", "it was killed again") == Seek()
    clock.advance(1.0)
    assert serve(machine)[-1] == Resume(1.0)


# ---- time limits


@pytest.mark.parametrize("stage", ["placing", "starting"])
def test_the_wait_for_successors_ends_with_a_reason(stage):
    machine, clock = in_stage(stage)
    clock.advance(LIMIT_S - 0.5)
    assert not isinstance(machine.checked(LEADER), Fail)
    clock.advance(0.5)
    assert machine.checked([*LEADER, "a slot"]) == Fail("No the next leader, a slot came within 40 s.")
    assert machine.stage == "closed"
    assert machine.checked(LEADER) is None


def test_successors_that_come_after_the_limit_but_before_anyone_looked_are_taken():
    machine, clock = in_stage("placing")
    clock.advance(LIMIT_S)
    assert machine.checked([]) == Start(1)


def test_each_stage_has_the_whole_time_but_another_loss_does_not_prolong_a_search():
    machine, clock = in_stage("placing")
    clock.advance(LIMIT_S - 1.0)
    machine.checked([])
    clock.advance(LIMIT_S - 1.0)
    assert not isinstance(machine.checked(LEADER), Fail)
    machine.lost("shard-0", "it was killed again")
    clock.advance(LIMIT_S - 1.0)
    assert not isinstance(machine.checked(LEADER), Fail)
    machine.lost("shard-1", "it was killed as well")
    clock.advance(1.0)
    assert isinstance(machine.checked(LEADER), Fail)


@pytest.mark.parametrize("stage", ["placing", "starting"])
def test_a_long_wait_is_announced(stage):
    machine, clock = in_stage(stage)
    clock.advance(14.0)
    assert machine.checked(LEADER) is None
    clock.advance(1.0)
    assert machine.checked(LEADER) == Stalled(LEADER, 15.0)
    assert machine.checked(LEADER) is None


# ---- end


@pytest.mark.parametrize("stage", ["serving", "placing", "starting", "connecting", "closed"])
def test_nothing_begins_or_goes_on_once_the_machine_is_closed(stage):
    machine, _ = in_stage(stage)
    machine.close()
    assert machine.lost("shard-0", "it was killed") is None
    assert serve(machine) == [None, None, None]
    assert machine.stage == "closed"
    assert not machine.serves(machine.attempt)


# ---- any order

PARTS = st.lists(st.sampled_from(["shard-0", "shard-1"]), max_size=2)
REPORTS = st.one_of(
    st.tuples(st.just("lost"), st.sampled_from(["shard-0", "shard-1"])),
    st.tuples(st.just("checked"), PARTS),
    st.tuples(st.just("checked"), st.just([])),
    st.tuples(st.just("called"), st.tuples(st.integers(0, 2), st.booleans())),
    st.tuples(st.just("passed"), st.floats(0.0, 50.0)),
    st.tuples(st.sampled_from(["close"] + ["passed"] * 9), st.just(0.0)),
)


def report(machine: FailoverMachine, clock: ManualClock, kind: str, data: object) -> object:
    """Pass one report to the machine; calls are reported for one of the last attempts."""
    match kind:
        case "lost":
            return machine.lost(data, "it was killed")
        case "checked":
            return machine.checked(data)
        case "called":
            return machine.called(machine.attempt - data[0], answered=data[1])
        case "passed":
            return clock.advance(data)
        case _:
            return machine.close()


@given(st.lists(REPORTS, max_size=60))
def test_reports_in_any_order_keep_to_the_states(reports):
    machine, clock = make()
    searching = reached = closed = False  # a thread reports; successors were called, and nothing was lost since then
    started = 0
    for kind, data in reports:
        effect = report(machine, clock, kind, data)
        match effect:
            case Seek():
                assert not searching
                searching = True
            case Start(attempt):
                started += 1
                assert attempt == started
            case Reach(attempt):
                assert attempt == started
                reached = True
            case Resume(seconds):
                assert reached
                assert seconds >= 0.0
                searching = reached = False
            case Fail():
                assert searching
                closed = True
        reached = reached and kind not in ("lost", "close") and not (kind == "called" and machine.stage == "placing")
        closed = closed or kind == "close"
        assert (machine.stage == "closed") == closed
        assert effect is None or searching or isinstance(effect, Resume)
        assert machine.restoring == (searching and not closed)
        assert machine.attempt == started


@given(st.lists(REPORTS, max_size=60), st.booleans())
def test_whatever_has_happened_a_failover_ends_whether_successors_come_or_not(reports, come):
    machine, clock = make()
    for kind, data in reports:
        report(machine, clock, kind, data)
    if not come:
        machine.called(machine.attempt, answered=False)  # in "connecting": calls have limits of their own
        restoring = machine.restoring
        clock.advance(LIMIT_S)
        assert isinstance(machine.checked(LEADER), Fail) == restoring
    serve(machine)
    serve(machine)
    assert not machine.restoring
