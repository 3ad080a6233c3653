"""Rows of each task: every row of a pass once, in order, for all sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.order import keras_order, order_crc, sample_order
from nfdt.core.work.tasks import Task
from nfdt.schedulers.ranges import Ranges
from nfdt.schedulers.sources import FedTasks, PlannedTasks
from nfdt.schedulers.tasks import Position, TaskPlan
from nfdt.schedulers.throughput import lease_size

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 40), st.integers(1, 5))


def rows(tasks):
    return [(t.pass_index, row) for t in tasks for row in range(t.start, t.stop)]


def all_tasks(plan):
    return [task for index in range(len(plan)) for task in plan.round(index)]


@given(SIZES)
def test_an_epoch_is_one_pass_every_row_once_in_order(sizes):
    samples, batch, parts = sizes
    plan = TaskPlan(samples, batch, parts, begin=Position(pass_index=3, task=50), synchronous=True)
    tasks = all_tasks(plan)
    assert [task.task for task in tasks] == list(range(50, 50 + len(tasks)))
    assert rows(tasks) == [(3, row) for row in range(samples)]
    assert len(plan) == -(-samples // (batch * parts))
    assert (plan.end.pass_index, plan.end.row) == (4, 0)


@given(SIZES, st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_epochs_of_given_length_go_on_within_the_pass_and_end_with_it(sizes, epochs):
    samples, batch, parts = sizes
    position, seen, numbers = Position(), [], []
    for steps in epochs:
        plan = TaskPlan(samples, batch, parts, steps, position, synchronous=True)
        assert len(plan) <= steps
        tasks = all_tasks(plan)
        assert len(plan) == steps or plan.end.row == 0
        assert {t.pass_index for t in tasks} == {position.pass_index}
        seen += rows(tasks)
        numbers += [t.task for t in tasks]
        assert {t.round for t in tasks} == set(range(position.round, position.round + len(plan)))
        position = plan.end
        assert position.task > max(numbers)
        assert position.round == plan.begin.round + len(plan)
    assert seen == [divmod(i, samples) for i in range(len(seen))]
    assert len(set(numbers)) == len(numbers)


@given(SIZES)
def test_a_round_is_cut_in_local_batches_and_empty_parts_are_left_out(sizes):
    samples, batch, parts = sizes
    plan = TaskPlan(samples, batch, parts, synchronous=True)
    for index in range(len(plan)):
        tasks = plan.round(index)
        assert 1 <= len(tasks) <= parts
        assert [t.part for t in tasks] == list(range(len(tasks)))
        assert {t.parts for t in tasks} == {len(tasks)}
        assert all(t.samples == t.stop - t.start for t in tasks)
        assert all(t.samples == batch for t in tasks[:-1])
        assert 1 <= tasks[-1].samples <= batch


def test_the_tail_by_hand():
    plan = TaskPlan(10, 3, 2, synchronous=True)
    assert [[(t.start, t.stop) for t in plan.round(i)] for i in range(len(plan))] == [
        [(0, 3), (3, 6)],
        [(6, 9), (9, 10)],
    ]


def test_asynchronous_tasks_have_no_round():
    assert {(t.round, t.part, t.parts) for t in all_tasks(TaskPlan(10, 3))} == {(0, 0, 1)}


@given(st.integers(0, 50), st.integers(1, 6))
def test_static_shares_are_contiguous_even_and_complete(steps, workers):
    if steps == 0:
        return
    names = [f"w{i}" for i in range(workers)]
    source = PlannedTasks(TaskPlan(steps, 1))
    source.divide(dict.fromkeys(names, 1.0))
    shares = [[t.start for t in source.take(name, steps)] for name in names]
    assert sum(shares, []) == list(range(steps))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert source.finished


def test_nothing_is_lost_without_workers_or_without_rows_to_divide():
    source = PlannedTasks(TaskPlan(6, 1))
    source.divide({})
    assert [task.start for task in source.take("a", 10)] == list(range(6))
    source.divide({"a": 1.0})
    assert source.finished
    assert not Ranges(range(0)).has("a")


def test_a_lost_workers_share_is_taken_when_the_own_one_is_empty():
    source = PlannedTasks(TaskPlan(6, 1))
    source.divide({"a": 1.0, "b": 1.0})
    source.release("b")
    assert [t.start for t in source.take("a", 10)] == [0, 1, 2]
    assert [t.start for t in source.take("late", 2)] == [3, 4]
    assert [t.start for t in source.take("a", 10)] == [5]


def test_fed_rounds_are_consecutive_batches_and_the_last_is_short():
    source = FedTasks(parts=2, synchronous=True, begin=Position(task=10, round=4))
    for text in (b"a", b"b", b"c"):
        source.feed(text, 8)
    assert [(t.task, t.data, t.round, t.part, t.parts) for t in source.take_round()] == [
        (10, b"a", 4, 0, 2),
        (11, b"b", 4, 1, 2),
    ]
    assert source.take_round() == []
    source.end()
    assert [(t.data, t.round, t.part, t.parts) for t in source.take_round()] == [(b"c", 5, 0, 1)]
    assert source.finished
    assert source.end_position == Position(0, 0, 13, 6)


def test_fed_batches_are_tasks_of_so_many_rows_in_the_order_they_came():
    source = FedTasks(begin=Position(task=10, round=4))
    assert not source.available("a")
    source.feed(b"a", 8)
    source.feed(b"b", 3)
    source.feed(b"c", 3)
    assert (source.available("a"), source.accepted, source.remaining) == (True, 3, 3)
    assert source.take("a", 2) == [Task(10, 0, 8, data=b"a", samples=8), Task(11, 0, 3, data=b"b", samples=3)]
    assert source.take_round() == [Task(12, 0, 3, data=b"c", samples=3)]
    assert not source.available("a")
    assert not source.exhausted("a")  # more may come
    source.end()
    assert source.exhausted("a")


def test_a_round_of_fed_batches_begins_when_all_its_parts_are_there():
    source = FedTasks(parts=2, synchronous=True)
    source.feed(b"a", 8)
    assert source.take_round() == []
    source.feed(b"b", 8)
    assert [task.data for task in source.take_round()] == [b"a", b"b"]


def test_a_stopped_feed_takes_nothing_more():
    source = FedTasks()
    source.feed(b"a", 1)
    source.drop()
    source.feed(b"b", 1)
    assert source.finished
    assert source.accepted == 1


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_the_order_is_a_permutation_fixed_by_seed_and_pass(samples, seed, pass_index):
    order = sample_order(samples, True, seed, pass_index)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(samples))
    assert np.array_equal(order, sample_order(samples, True, seed, pass_index))
    assert np.array_equal(sample_order(samples, False, seed, pass_index), np.arange(samples))


def test_orders_differ_between_passes_and_seeds_and_so_do_their_checksums():
    orders = [sample_order(100, True, seed, p) for seed in (0, 1) for p in (0, 1)]
    assert len({order_crc(o) for o in orders}) == 4


def test_the_order_is_the_same_on_every_machine():
    assert sample_order(8, True, 1, 2).tolist() == [7, 0, 5, 4, 6, 2, 3, 1]
    assert keras_order(8, 1, 8).tolist() == [0, 4, 1, 5, 7, 6, 2, 3]


@given(st.integers(1, 300), st.integers(0, 2**31 - 2), st.integers(1, 300))
def test_the_order_of_keras_permutes_the_rows_of_each_block(samples, seed, block):
    order = keras_order(samples, seed, block)
    assert order.dtype == np.int64
    for start in range(0, samples, block):
        assert sorted(order[start : start + block]) == list(range(start, min(start + block, samples)))


@pytest.mark.parametrize(
    ("remaining", "workers", "task_s", "size"),
    [
        (1000, 2, None, 1),
        (1000, 2, 0.01, 20),
        (1000, 2, 1e-6, 64),
        (1000, 2, 5.0, 1),
        (20, 2, 0.001, 5),
        (7, 1, 0.001, 3),
        (1, 4, 0.001, 1),
    ],
)
def test_leases_last_a_fifth_of_a_second_and_shrink_towards_the_end(remaining, workers, task_s, size):
    assert lease_size(remaining, workers, task_s) == size


def test_a_lease_of_fed_batches_is_limited_by_their_bytes(monkeypatch):
    monkeypatch.setattr("nfdt.schedulers.sources.LEASE_BYTES", 10)
    source = FedTasks()
    for size in (4, 6, 1, 30, 1):
        source.feed(bytes(size), 1)
    taken = []
    while source.remaining:
        taken.append([len(task.data) for task in source.take("a", 8)])
    assert taken == [[4, 6], [1], [30], [1]]
