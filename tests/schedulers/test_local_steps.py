"""The number of steps that each worker makes between two exchanges, and the rounds of such steps."""

from __future__ import annotations

import pytest

from nfdt.schedulers.local_steps import LocalStepSizes
from nfdt.schedulers.sources import SizedTasks
from nfdt.schedulers.tasks import Position, TaskPlan

BATCH = 32


def measured(sizes, step_s, pushes=None, tasks=8):
    """Let each worker make some tasks at its speed, in turn."""
    for worker in step_s:
        sizes.joined(worker)
    for _ in range(tasks):
        for worker, seconds in step_s.items():
            rows = sizes.of(worker)
            sizes.trained(worker, rows, rows / BATCH * seconds, (pushes or {}).get(worker, 0.0))
    return sizes


def test_the_fastest_makes_all_steps_and_others_in_proportion():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.01, "b": 0.02, "c": 0.05, "d": 1.0})
    assert sizes.steps == {"a": 16, "b": 8, "c": 3, "d": 1}
    assert sizes.of("c") == 3 * BATCH
    sizes.left("a")
    sizes.left("unknown")
    assert "a" not in sizes.steps


def test_speeds_that_differ_by_a_measurement_are_the_same():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.01, "b": 0.01015, "c": 0.0405, "d": 0.042})
    assert sizes.steps == {"a": 16, "b": 16, "c": 4, "d": 3}


def test_one_task_shows_a_speed_and_the_first_one_counts_least():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.01, "b": 0.04}, tasks=1)
    assert sizes.steps == {"a": 16, "b": 4}
    slow_start = LocalStepSizes(BATCH, 16)
    for worker in ("a", "b"):
        slow_start.joined(worker)
        for seconds in (9.0 if worker == "a" else 0.1, 0.1):
            slow_start.trained(worker, BATCH, seconds, 0.0)
    assert slow_start.steps == {"a": 16, "b": 16}
    slow_start.trained("unknown", BATCH, 0.1, 0.0)
    assert "unknown" not in slow_start.steps


def test_before_any_measurement_all_make_as_many():
    sizes = LocalStepSizes(BATCH, 4)
    sizes.joined("a")
    assert sizes.of("a") == sizes.of("unknown") == 4 * BATCH


@pytest.mark.parametrize(
    ("push_s", "steps"),
    [(0.0001, 1), (0.0011, 2), (0.01, 10), (0.05, 50), (5.0, 64)],
)
def test_auto_lets_a_push_take_a_tenth_of_the_time(push_s, steps):
    sizes = measured(LocalStepSizes(BATCH, None), {"a": 0.01}, {"a": push_s})
    assert sizes.steps == {"a": steps}


def test_auto_depends_on_the_link_of_each_worker():
    sizes = measured(LocalStepSizes(BATCH, None), {"near": 0.01, "far": 0.01}, {"near": 0.002, "far": 0.03})
    assert sizes.steps == {"near": 2, "far": 30}


def test_rounds_are_divided_by_speed_in_whole_batches():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.01, "b": 0.03})
    assert sizes.split(2 * 16 * BATCH) == [("a", 24 * BATCH), ("b", 8 * BATCH)]
    assert sizes.split(3 * BATCH + 5) == [("a", 3 * BATCH), ("b", 5)]
    assert sum(rows for _, rows in sizes.split(7)) == 7


def test_a_round_has_all_workers_steps_and_an_epoch_counts_steps():
    sizes = LocalStepSizes(BATCH, 4)
    for worker in ("a", "b"):
        sizes.joined(worker)
    plan = TaskPlan(1000, 4 * BATCH, 2, None, Position(), True, round_steps=4)
    assert plan.step_count == -(-1000 // (2 * BATCH)) == 16
    source = SizedTasks(plan, sizes)
    rounds = [source.take_round() for _ in range(len(plan))]
    assert [len(tasks) for tasks in rounds] == [2, 2, 2, 2]
    rows = [row for tasks in rounds for task in tasks for row in range(task.start, task.stop)]
    assert rows == list(range(1000))
    assert {task.round for task in rounds[1]} == {2}
    assert all((task.stop - task.start) % BATCH == 0 for tasks in rounds[:-1] for task in tasks)


def test_tasks_of_batches_by_index_count_their_samples():
    sizes = LocalStepSizes(1, 4, row_samples=BATCH)
    sizes.joined("a")
    source = SizedTasks(TaskPlan(10, 1, row_samples=BATCH), sizes)
    tasks = source.take("a", 3)
    assert [(task.start, task.stop, task.samples) for task in tasks] == [(0, 4, 128), (4, 8, 128), (8, 10, 64)]


def test_a_worker_of_unknown_speed_gets_a_quarter_of_its_share_at_most():
    sizes = LocalStepSizes(BATCH, 16)
    for worker in ("a", "b"):
        sizes.joined(worker)
    assert sizes.next("a", 1000 * BATCH) == 16 * BATCH
    assert sizes.next("a", 40 * BATCH) == 5 * BATCH
    assert sizes.next("a", 1 * BATCH) == 1 * BATCH
    sizes.trained("a", 5 * BATCH, 0.5, 0.0)
    assert sizes.next("a", 40 * BATCH) == 5 * BATCH, "the other one may be slow"


def test_the_end_of_an_epoch_is_divided_by_speed():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.01, "b": 0.03})
    assert sizes.next("a", 100 * BATCH) == 16 * BATCH
    assert sizes.next("a", 8 * BATCH) == 6 * BATCH
    assert sizes.next("b", 8 * BATCH) == 2 * BATCH
    assert sizes.next("a", 1 * BATCH) == 2 * BATCH, "an eighth of its steps, or what is left"


def test_the_last_tasks_of_an_epoch_end_together():
    speeds, left, ends = {"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.4}, 800, dict.fromkeys("abcd", 0.0)
    sizes = measured(LocalStepSizes(BATCH, None), speeds, dict.fromkeys(speeds, 5.0))
    assert set(sizes.steps.values()) == {64}
    while left:
        worker = min(ends, key=lambda name: ends[name])
        sizes.look(ends[worker])
        steps = min(left, sizes.next(worker, left * BATCH) // BATCH)
        sizes.leased(worker, steps * BATCH, ends[worker])
        left -= steps
        ends[worker] += steps * speeds[worker]
    assert max(ends.values()) < 800 / sum(1 / step_s for step_s in speeds.values()) + 1.0
    assert max(ends.values()) - min(ends.values()) < 8 * 0.4, "the smallest task of the slowest"


def test_who_is_behind_gets_no_more_than_the_smallest_task():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.01, "b": 0.01})
    sizes.leased("a", 100 * BATCH, 5.0)
    sizes.look(5.0)
    assert sizes.next("a", 10 * BATCH) == 2 * BATCH
    assert sizes.next("b", 10 * BATCH) == 16 * BATCH
    sizes.left("a")
    assert sizes.next("b", 10 * BATCH) == 10 * BATCH


def test_a_slow_worker_leaves_the_last_batches_to_a_faster_one_that_is_soon_done():
    sizes = measured(LocalStepSizes(BATCH, 16), {"fast": 0.1, "slow": 0.4})
    sizes.look(10.0)
    sizes.leased("fast", 2 * BATCH, 10.0)  # until 10.2
    assert sizes.next("slow", 5 * BATCH) == 1 * BATCH, "its share"
    assert sizes.next("slow", 1 * BATCH) == 0, "done at 10.4, the other one at 10.3"
    sizes.look(10.3)
    assert sizes.next("fast", 1 * BATCH) == 2 * BATCH, "or what is left"
    assert sizes.next("slow", 1 * BATCH) == 1 * BATCH, "nobody is busy, so somebody must begin"


def test_a_worker_that_is_busy_itself_leaves_the_last_batches_to_one_that_is_sooner_done():
    sizes = measured(LocalStepSizes(BATCH, 16), {"a": 0.1, "b": 0.1})
    sizes.look(10.0)
    sizes.leased("a", 16 * BATCH, 10.0)  # it asks for more at once
    sizes.leased("b", 4 * BATCH, 10.0)
    assert sizes.next("a", 2 * BATCH) == 0
    sizes.look(10.4)
    assert sizes.next("b", 2 * BATCH) >= 2 * BATCH


def test_where_a_push_takes_longer_than_a_step_no_rest_is_left_for_another_one():
    speeds = {"fast": 0.1, "slow": 0.4}
    sizes = measured(LocalStepSizes(BATCH, 16), speeds, dict.fromkeys(speeds, 2.0))
    sizes.look(10.0)
    sizes.leased("fast", 2 * BATCH, 10.0)
    assert sizes.next("slow", 5 * BATCH) == 2 * BATCH, "1.4 of them"
    assert sizes.next("slow", 1 * BATCH) == 1 * BATCH, "the other one would need two pushes"


@pytest.mark.parametrize("seconds", [(0.2, 0.2, 0.8, 0.8), (0.05, 0.06, 0.2, 1.0), (0.1, 0.13, 0.2, 0.4, 0.7)])
def test_an_epoch_of_any_length_ends_within_half_a_step_of_the_slowest_after_its_limit(seconds):
    for batches in range(60, 140):
        sizes = measured(LocalStepSizes(BATCH, 16), {f"w{i}": each for i, each in enumerate(seconds)})
        asks, left, ended = dict.fromkeys(sizes.steps, 0.0), batches, 0.0
        while left:
            worker = min(asks, key=lambda name: asks[name])
            sizes.look(now := asks[worker])
            steps = min(left, sizes.next(worker, left * BATCH) // BATCH)
            if not steps:  # it is asked again when another one is done
                asks[worker] = min(at for at in asks.values() if at > now)
                continue
            sizes.leased(worker, steps * BATCH, now)
            asks[worker] = now + steps * seconds[int(worker[1])]
            ended, left = max(ended, asks[worker]), left - steps
        assert ended < batches / sum(1 / each for each in seconds) + 0.51 * seconds[-1]
