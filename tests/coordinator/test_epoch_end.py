"""Phases at an epoch's end: the part of a report that each accepts, and whether it advances the phase."""

from __future__ import annotations

from nfdt.coordinator import epoch_metrics
from nfdt.coordinator.epoch_phases import Collecting, Summarising, Validating
from nfdt.coordinator.membership import Member
from nfdt.core.work.instructions import CollectState, EpochState, Evaluate, Evaluated, Report, Summarise, Summary, Wait
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import PlannedTasks
from nfdt.schedulers.tasks import TaskPlan

A, B = Member("a", 0, 0.0), Member("b", 1, 0.0)


def state(epoch: int = 3, steps: int = 1, text: bytes = b"m") -> Report:
    return Report(epoch_state=EpochState(epoch, b"u" + text, text, steps))


def test_states_are_collected_once_from_all_workers_that_took_part(monkeypatch):
    phase = Collecting(3, {"b": 1, "a": 0})
    assert phase.waiting_for() == ("a", "b")
    assert phase.instruct(A, 0.0) == CollectState(3, over=True)
    assert not phase.absorb(A, Report(), 0.0)
    assert not phase.absorb(A, state(epoch=2), 0.0)
    assert not phase.absorb(Member("late", 2, 0.0), state(), 0.0)
    assert phase.absorb(B, state(steps=5, text=b"B"), 0.0)
    assert not phase.absorb(B, state(), 0.0)
    assert phase.instruct(B, 0.0) == Wait()
    assert (phase.done, phase.waiting_for()) == (False, ("a",))
    assert phase.absorb(A, state(text=b"A"), 0.0)
    assert phase.done
    merged: list[list[bytes]] = []
    monkeypatch.setattr(epoch_metrics, "merge_metric_states", merged.append)
    phase.metrics()
    assert sorted(phase.untrained(lambda worker: True)) == [(0, 1, b"uA"), (1, 5, b"uB")]
    assert merged == [[b"A", b"B"]]  # by index, not by order of arrival


def test_no_phase_waits_for_the_state_of_a_worker_that_is_gone():
    phase = Collecting(3, {"a": 0, "b": 1})
    assert phase.absorb(A, state(), 0.0)
    assert phase.lost("b") == phase.lost("b") == 0
    assert phase.done
    assert phase.metrics() == b"m"


def validating(rows: int, workers: int) -> Validating:
    return Validating(3, LeaseBook(PlannedTasks(TaskPlan(rows, 1))), b"shared", lambda: workers)


def test_validation_is_shared_out_in_pieces_that_shrink():
    phase, sizes = validating(16, 2), []
    while not phase.done:
        instruction = phase.instruct(A, 0.0)
        assert (instruction.epoch, instruction.untrained) == (3, b"shared")
        assert phase.instruct(A, 0.0) == instruction
        assert phase.waiting_for() == ("a",)
        sizes.append(len(instruction.tasks))
        assert phase.absorb(A, Report(evaluated=Evaluated(3, tuple(t.task for t in instruction.tasks), b"m")), 0.0)
    assert sizes == [1, 3, 3, 2, *[1] * 7]  # one until its duration is known
    assert phase.answers == [b"m"] * len(sizes)
    assert phase.instruct(B, 0.0) == Wait()


def test_an_answer_that_is_not_about_the_rows_held_is_asked_for_again():
    phase = validating(5, 1)
    first = phase.instruct(A, 0.0)
    assert phase.absorb(A, Report(evaluated=Evaluated(3, (first.tasks[0].task,), b"")), 0.0)
    instruction = phase.instruct(A, 0.0)
    held = tuple(task.task for task in instruction.tasks)
    answers = [Evaluated(2, held, b""), Evaluated(3, (), b""), Evaluated(3, (*held, 9), b""), Evaluated(3, (9,), b"")]
    assert [phase.absorb(A, Report(evaluated=answer), 0.0) for answer in [None, *answers]] == [False] * 5
    assert not phase.absorb(B, Report(evaluated=Evaluated(3, held, b"")), 0.0)
    assert phase.instruct(A, 0.0) == instruction
    assert phase.answers == [b""]


def test_an_answer_about_some_of_the_rows_held_counts_and_the_others_are_asked_for():
    phase = validating(8, 1)
    phase.absorb(A, Report(evaluated=Evaluated(3, (phase.instruct(A, 0.0).tasks[0].task,), b"1")), 0.0)
    held = phase.instruct(A, 0.0).tasks
    assert len(held) > 1
    report = Report(evaluated=Evaluated(3, (held[0].task,), b"2"))
    assert [phase.absorb(A, report, 0.0), phase.absorb(A, report, 0.0)] == [True, False]
    assert phase.instruct(A, 0.0).tasks == held[1:]
    assert phase.answers == [b"1", b"2"]


def test_rows_of_a_lost_worker_are_evaluated_by_others():
    phase = validating(4, 1)
    instruction = phase.instruct(A, 0.0)
    assert isinstance(instruction, Evaluate)
    assert phase.lost("a") == len(instruction.tasks)
    assert phase.instruct(B, 0.0).tasks == instruction.tasks


def test_one_worker_summarises_and_another_one_if_it_is_lost():
    order = Summarise(3, b"m", b"", {})
    phase = Summarising(order)
    assert phase.waiting_for() == ()
    assert [phase.instruct(A, 0.0), phase.instruct(B, 0.0), phase.instruct(A, 0.0)] == [order, Wait(), order]
    assert phase.waiting_for() == ("a",)
    summary = Report(summary=Summary({"loss": 1.0}))
    assert not phase.absorb(B, summary, 0.0)
    assert not phase.absorb(A, Report(), 0.0)
    assert phase.lost("b") == 0
    assert phase.waiting_for() == ("a",)
    assert phase.lost("a") == 0
    assert [phase.instruct(B, 0.0), phase.instruct(A, 0.0)] == [order, Wait()]
    assert not phase.done
    assert phase.absorb(B, summary, 0.0)
    assert phase.done
    assert phase.summary == Summary({"loss": 1.0})
