"""Tasks of the next epoch that workers with steps of their own begin while the last pushes of an epoch travel."""

from __future__ import annotations

import pytest

from nfdt.core.work.instructions import Wait, Work
from tests.support.simulated_cluster import job, started

A, B = "worker-0", "worker-1"
BATCH, STEPS = 2, 8


def spec(**options):
    fit = {"samples": 128, "batch_size": BATCH, "epochs": 2, "interactive": False, **options}
    return job("local-ddc", overrides={"local_steps": STEPS}, **fit)


def at_the_end(cluster):
    """Let the workers train the epoch in turn, until each begins a task of the next one; return these instructions."""
    found = {}
    for _ in range(200):
        for name in set(cluster.workers) - set(found):
            worker = cluster.workers[name]
            instruction = worker.ask()
            if isinstance(instruction, Work) and instruction.epoch > worker.epoch:
                found[name] = instruction
            else:
                worker.do()
            cluster.settle()
        cluster.clock.advance(0.01)
        if len(found) == len(cluster.workers):
            return found
    raise AssertionError(f"{cluster.coordinator.phase}: {found}")


def test_a_worker_begins_its_first_task_of_the_next_epoch_and_ends_it_there():
    cluster = started(spec())
    found = at_the_end(cluster)
    assert [type(each) for each in found.values()] == [Work, Work]
    (task,) = found[A].tasks
    assert (task.pass_index, task.stop - task.start) == (1, (STEPS - 1) * BATCH), "the last batch is one of the epoch"
    cluster.workers[A].do()
    assert isinstance(cluster.workers[A].ask(), Wait)
    cluster.run()
    assert all(set(rows.values()) == {1} for rows in cluster.trained.values())
    (whole,) = [each for name, each in cluster.pushes if each.task == task.task]
    assert (whole.start, whole.stop - whole.start) == (task.start, STEPS * BATCH)


@pytest.mark.parametrize(
    "options",
    [{"epochs": 1}, {"validation": 8}, {"workers": 1}, {"batch_size": 128}],
    ids=["last epoch", "validation", "alone", "no speed is known"],
)
def test_nobody_begins_early_where_the_next_epoch_may_not_follow_or_a_worker_trains_alone(options):
    cluster = started(spec(**options))
    for _ in range(100):
        for worker in cluster.workers.values():
            instruction = worker.ask()
            assert not isinstance(instruction, Work) or instruction.epoch == worker.epoch
            worker.do()
        cluster.settle()


def test_nothing_that_was_begun_early_is_pushed_if_the_client_stops_the_training():
    cluster = started(spec(interactive=True))
    at_the_end(cluster)
    cluster.workers[A].do()
    cluster.coordinator.stop_training()
    cluster.run()
    assert list(cluster.trained) == [0]


def test_what_was_begun_early_is_begun_again_if_something_changes_before_the_epoch():
    cluster = started(spec())
    found = at_the_end(cluster)
    cluster.workers[A].do()
    cluster.coordinator.forgo_early()
    while cluster.coordinator.epoch == 0:
        instruction = cluster.workers[A].ask()
        assert not isinstance(instruction, Work) or instruction.epoch == cluster.workers[A].epoch
        cluster.workers[A].do()
        cluster.turn(B)
        cluster.flush()
        cluster.proceed()
    cluster.run()
    assert all(set(rows.values()) == {1} for rows in cluster.trained.values())
    begun = {task.task for instruction in found.values() for task in instruction.tasks}
    assert begun.isdisjoint(task.task for _, task in cluster.pushes), "no part of it may count"


def test_what_a_lost_worker_has_begun_is_trained_by_another_one():
    cluster = started(spec())
    found = at_the_end(cluster)
    cluster.workers[A].do()
    cluster.kill(A)
    cluster.run()
    assert all(set(rows.values()) == {1} for rows in cluster.trained.values())
    assert found[A].tasks[0].task in {task.task for name, task in cluster.pushes if name == B}


def test_a_worker_that_has_begun_early_is_not_late():
    cluster = started(spec())
    at_the_end(cluster)
    cluster.workers[A].do()
    cluster.workers[A].ask()
    member = cluster.coordinator._members.get(A)
    assert not member.is_late(0.1, now=1e6)
    member.suspected = True
    assert member.is_late(0.1, now=1e6)
