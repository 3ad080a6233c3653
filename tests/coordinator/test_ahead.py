"""Epochs that begin before the end of the last one is processed: exactly the same training, or no trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.work.instructions import BeginEpoch, Evaluate, Leave, Summarise, TrainingDone, Wait, Work
from tests.support.restorable_cluster import RestorableCluster
from tests.support.simulated_cluster import job

A, B = "worker-0", "worker-1"


def begun(spec, *, until=None, workers=2) -> RestorableCluster:
    cluster = RestorableCluster(spec)
    cluster.join(workers)
    cluster.coordinator.proceed(0, until)
    cluster.settle()
    return cluster


def turns(cluster, count, names=None):
    for _ in range(count):
        for name in names or list(cluster.workers):
            cluster.turn(name)
        cluster.clock.advance(0.01)


def flushed(cluster):
    """Run to the end of the first epoch's training, and store its state."""
    while not cluster.unflushed:
        turns(cluster, 1)
    cluster.flush()


def ended(cluster):
    """Run to the end of the epoch, at which the client is waited for."""
    while cluster.coordinator.phase != "hold":
        turns(cluster, 1)


def given_to(cluster, name, kind):
    """Return the first instruction of this kind that a worker gets, which others do not carry out."""
    for _ in range(50):
        instruction = cluster.workers[name].ask()
        if isinstance(instruction, kind):
            return instruction
        if not isinstance(instruction, Wait):
            cluster.workers[name].do()
    raise AssertionError(f"{name} got no {kind.__name__} in phase {cluster.coordinator.phase}")


def applied(cluster):
    """Return whether the weights contain each row of both epochs once."""
    return {epoch: dict(rows) for epoch, rows in cluster.rows_applied().items()} == {
        epoch: {(epoch, row): 1 for row in range(20)} for epoch in range(2)
    }


def test_workers_train_the_next_epoch_while_the_last_one_is_validated():
    cluster = begun(job(epochs=2, validation=8))
    flushed(cluster)
    assert cluster.coordinator.phase == "validate"
    assert given_to(cluster, A, Evaluate).ahead
    assert given_to(cluster, B, BeginEpoch).epoch == 1
    cluster.workers[B].do()
    evaluation = cluster.workers[B].ask()
    while isinstance(evaluation, Evaluate):
        cluster.workers[B].do()
        evaluation = cluster.workers[B].ask()
    assert isinstance(evaluation, Work)
    assert evaluation.epoch == 1
    assert cluster.coordinator.phase == "validate"


def test_nobody_is_told_of_an_epoch_ahead_before_it_is_permitted():
    cluster = begun(job(epochs=2))
    flushed(cluster)
    ended(cluster)
    turns(cluster, 30)
    assert cluster.coordinator.ahead.training.book.done
    assert [event["epoch"] for event in cluster.of("epoch_begin")] == [0]
    assert {event["epoch"] for event in cluster.of("progress")} == {0}
    assert (cluster.coordinator.epochs_ended, cluster.coordinator.passed) == (1, True)
    assert all(isinstance(worker.ask(), Wait) for worker in cluster.workers.values())
    cluster.proceed()
    assert [event["epoch"] for event in cluster.of("epoch_begin")] == [0, 1]
    assert not cluster.coordinator.passed
    cluster.run()
    assert [(event["epoch"], event["samples"]) for event in cluster.of("epoch_end")] == [(0, 20), (1, 20)]
    assert applied(cluster)


def test_one_epoch_is_ahead_at_most():
    cluster = begun(job(epochs=3))
    flushed(cluster)
    turns(cluster, 60)
    assert max(cluster.rows_applied()) == 1
    cluster.run()
    assert len(cluster.of("epoch_end")) == 3


@pytest.mark.parametrize(
    ("preset", "fit"), [("bsp", {}), ("ssp", {}), ("n-softsync", {}), ("asgd", {"epochs": 1})], ids=str
)
def test_bounded_policies_and_the_last_epoch_have_none(preset, fit):
    cluster = begun(job(preset, validation=8, **{"epochs": 2, **fit}))
    flushed(cluster)
    turns(cluster, 3)
    assert cluster.coordinator.ahead is None


def test_there_is_none_while_the_client_permits_single_steps_or_keeps_no_weights():
    for until, keeps in ((5, True), (None, False)):
        cluster = begun(job(epochs=2, validation=8), until=until)
        cluster.keeps = keeps
        while until and not cluster.coordinator.standing:
            turns(cluster, 1)
        cluster.coordinator.proceed(0, 6 if until else None)
        cluster.settle()
        flushed(cluster)
        assert cluster.coordinator.ahead is None
        assert not given_to(cluster, A, Evaluate).ahead


@pytest.mark.parametrize("loses", [False, True], ids=["rolled back", "lost"])
def test_an_epoch_that_is_dropped_begins_again_with_the_same_tasks(loses):
    cluster = begun(job(epochs=2))
    flushed(cluster)
    turns(cluster, 4)
    first = [task for epoch, task in ((push.epoch, push.task) for push in cluster.shards[0].lineage) if epoch]
    assert first
    cluster.lose_shards() if loses else cluster.roll_back()
    assert cluster.coordinator.ahead is None
    cluster.restore()
    assert {push.epoch for push in cluster.shards[0].lineage} == {0}
    cluster.run()
    assert applied(cluster)
    again = [push.task for push in cluster.shards[0].lineage if push.epoch]
    assert {task.task for task in first} <= {task.task for task in again}
    assert cluster.of("epoch_end")[1]["samples"] == 20
    assert sum(row["samples"] for row in cluster.coordinator.measured().values()) == 40
    assert cluster.redone == 0
    assert all([epoch for epoch, _ in worker.begun].count(1) <= 2 for worker in cluster.workers.values())


def test_without_an_epoch_ahead_nothing_is_rolled_back():
    cluster = begun(job(epochs=2))
    assert not cluster.coordinator.recovery.roll_back()
    flushed(cluster)
    cluster.lose_shards()
    assert not cluster.coordinator.recovery.roll_back()


def test_no_snapshot_is_taken_while_an_epoch_is_ahead():
    cluster = begun(job(epochs=2))
    flushed(cluster)
    assert not cluster.coordinator.recovery.begin_snapshot()
    ended(cluster)
    assert not cluster.coordinator.recovery.begin_snapshot()
    cluster.proceed()
    assert cluster.coordinator.recovery.begin_snapshot()


def test_an_end_leaves_the_state_of_the_epoch_that_has_ended():
    cluster = begun(job(epochs=2))
    flushed(cluster)
    ended(cluster)
    turns(cluster, 4)
    cluster.coordinator.stop_training()
    cluster.settle()
    assert TrainingDone() in cluster.effects
    assert cluster.coordinator.passed
    assert cluster.coordinator.ahead is None
    assert isinstance(cluster.workers[A].ask(), Leave)
    assert {push.epoch for push in cluster.newest[0].lineage} == {0}


def test_an_end_during_the_validation_begins_no_epoch():
    cluster = begun(job(epochs=2, validation=8))
    while not cluster.unflushed:
        turns(cluster, 1)
    cluster.coordinator.stop_training()
    cluster.flush()
    assert cluster.coordinator.ahead is None


def test_tasks_of_a_worker_that_is_lost_are_trained_by_others():
    cluster = begun(job(epochs=2))
    flushed(cluster)
    given_to(cluster, B, Work)
    cluster.workers[B].push_half()
    cluster.kill(B)
    cluster.run()
    assert applied(cluster)


def test_a_worker_that_joins_takes_part():
    cluster = begun(job(epochs=2, validation=8))
    flushed(cluster)
    cluster.join()
    given_to(cluster, "worker-2", BeginEpoch)
    cluster.run()
    assert applied(cluster)


def test_the_summary_is_asked_for_before_more_tasks():
    cluster = begun(job(epochs=2))
    flushed(cluster)
    assert given_to(cluster, A, Summarise).ahead


MOVES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=150)


@pytest.mark.parametrize("overrides", [{}, {"overlap": 2}, {"batch": "dbs", "tasks": "finish-together"}], ids=str)
@given(moves=MOVES, validation=st.none() | st.integers(1, 8))
def test_whatever_happens_each_row_of_each_epoch_is_applied_once(overrides, moves, validation):
    cluster = begun(job(epochs=3, validation=validation, overrides=overrides), workers=3)
    for what, number in moves:
        names = list(cluster.workers)
        if cluster.over:
            break
        match what:
            case 0:
                cluster.flush()
            case 1:
                cluster.proceed()
            case 2:
                cluster.roll_back()
            case 3:
                cluster.restore()
            case 4 if number == 0:
                cluster.lose_shards()
            case 4 if number == 1 and len(names) > 1:
                cluster.kill(names[-1])
            case 5:
                cluster.snapshot(1)
            case _ if names:
                cluster.turn(names[number % len(names)])
        cluster.clock.advance(0.003 * what)
    cluster.run()
    rows = cluster.rows_applied()
    assert {epoch: dict(counts) for epoch, counts in rows.items()} == {
        epoch: {(epoch, row): 1 for row in range(20)} for epoch in range(3)
    }
    assert [end["samples"] for end in cluster.of("epoch_end")] == [20, 20, 20]
    assert [event["epoch"] for event in cluster.of("epoch_begin")] == [0, 1, 2]
