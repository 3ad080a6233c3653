"""Batches that are cut on request: every row once, in the sizes of that moment."""

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.batch_policies import BatchSizes, Bounds
from nfdt.schedulers.group_shares import FixedSizes
from nfdt.schedulers.sources import SizedTasks
from nfdt.schedulers.tasks import Position, TaskPlan

BEGIN = Position(pass_index=2, row=4, task=100, round=7)


def stated(**sizes):
    """Return sizes with so many samples for each worker; any other worker takes 3."""
    found = FixedSizes(3)
    found.state(sizes)
    for worker in sizes:
        found.joined(worker)
    return found


def rows(tasks):
    return [(task.pass_index, row) for task in tasks for row in range(task.start, task.stop)]


@given(st.integers(5, 120), st.integers(1, 9), st.none() | st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1))
def test_every_row_of_the_epoch_is_cut_once_and_in_order(samples, batch, steps, sizes):
    plan = TaskPlan(samples, batch, steps=steps, begin=BEGIN)
    now = stated()
    source, tasks = SizedTasks(plan, now), []
    for size in cycle(sizes):
        now.state({"a": size})
        taken = source.take("a", 2)
        assert all(task.samples == task.stop - task.start == size for task in taken[:-1])
        tasks += taken
        if source.finished:
            break
    due = min(samples - BEGIN.row, batch * (steps or samples))
    assert rows(tasks) == [(2, BEGIN.row + i) for i in range(due)]
    assert [task.task for task in tasks] == list(range(100, 100 + len(tasks)))
    assert source.remaining == 0
    assert source.take("a", 2) == []
    assert source.exhausted("a")


def test_each_takes_its_own_size_as_often_as_it_asks_for():
    source = SizedTasks(TaskPlan(40, 3), stated(a=7, b=2))
    assert [task.samples for task in source.take("a", 2)] == [7, 7]
    assert [task.samples for task in source.take("b", 3)] == [2, 2, 2]
    assert [task.samples for task in source.take("new", 1)] == [3]
    assert source.remaining == 6  # of the 17 rows that are left, in batches of 3
    assert not source.finished


@given(st.integers(5, 200), st.integers(1, 9), st.integers(1, 6), st.integers(1, 6))
def test_a_round_holds_as_many_rows_as_the_plans_and_one_part_per_worker(samples, batch, fast, slow):
    plan = TaskPlan(samples, batch, parts=2, begin=BEGIN, synchronous=True)
    source = SizedTasks(plan, stated(a=fast, b=slow, c=2))
    rounds = []
    while round_ := source.take_round():
        rounds.append(round_)
        assert [task.part for task in round_] == list(range(len(round_)))
        assert {task.parts for task in round_} == {len(round_)}
        taken = {worker: round_[part].samples for worker, part in source.ranks.items()}
        assert len(taken) == len(round_)
        assert sum(taken.values()) == sum(task.samples for task in round_)
        assert (fast - slow) * (taken.get("a", 0) - taken.get("b", 0)) >= 0
    assert rows(task for round_ in rounds for task in round_) == [(2, row) for row in range(BEGIN.row, samples)]
    assert [sum(task.samples for task in round_) for round_ in rounds[:-1]] == [2 * batch] * (len(rounds) - 1)
    assert [{task.round for task in round_} for round_ in rounds] == [{7 + i} for i in range(len(rounds))]
    assert [t.task for round_ in rounds for t in round_] == list(range(100, 100 + sum(map(len, rounds))))


def test_rows_that_no_worker_may_take_are_parts_without_a_worker():
    sizes = BatchSizes(4, Bounds(1, 4))
    sizes.joined("a")
    source = SizedTasks(TaskPlan(20, 4, parts=2, synchronous=True), sizes)
    assert [task.samples for task in source.take_round()] == [4, 4]
    assert source.ranks == {"a": 0}


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_the_next_epoch_begins_after_the_last_row_with_unused_numbers(steps):
    plan = TaskPlan(30, 4, steps=steps, begin=BEGIN)
    source = SizedTasks(plan, stated(a=1))
    numbers = [task.task for task in source.take("a", 100)]
    end = SizedTasks.end(plan)
    assert end.task == max(numbers) + 1  # no more tasks can have been cut than there are rows
    assert (end.pass_index, end.row, end.round) == (plan.end.pass_index, plan.end.row, plan.end.round)


def test_a_share_is_its_workers_until_that_leaves():
    source = SizedTasks(TaskPlan(12, 2), stated(a=4, b=4))
    source.divide({"a": 1.0, "b": 2.0})
    assert rows(source.take("a", 9)) == [(0, row) for row in range(4)]
    assert not source.available("a")
    assert source.exhausted("a")
    assert source.available("b")
    assert not source.exhausted("b")
    source.release("b")
    assert source.available("a")
    assert rows(source.take("a", 1)) == [(0, row) for row in range(4, 8)]
    source.drop()
    assert not source.available("a")
    assert source.finished
