"""Coordinator without its shards, and after their return."""

import pytest

from nfdt.consistency import make_policy
from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.specs.job import EpochProgress
from nfdt.core.work.instructions import (
    BeginEpoch,
    CollectState,
    Evaluate,
    FlushShards,
    Leave,
    Report,
    TrainingDone,
    Wait,
    Work,
)
from tests.support.clocks import ManualClock
from tests.support.restorable_cluster import RestorableCluster, SimulatedShard
from tests.support.simulated_cluster import job

A, B = "worker-0", "worker-1"


def begun(spec, until=None):
    cluster = RestorableCluster(spec)
    cluster.join(spec.cluster.workers)
    cluster.coordinator.proceed(spec.fit.initial_epoch, until)
    cluster.settle()
    return cluster


def turns(cluster, count, names=None):
    for _ in range(count):
        for name in names or list(cluster.workers):
            cluster.turn(name)
        cluster.clock.advance(0.01)


def reach(cluster, phase):
    for _ in range(500):
        if cluster.coordinator.phase == phase:
            return
        turns(cluster, 1)
        if phase != "collect":
            cluster.flush()
    raise AssertionError(f"not in {phase} but in {cluster.coordinator.phase}")


def end_epoch(cluster):
    """Run to the end of the current epoch."""
    reach(cluster, "train")
    reach(cluster, "hold")


def until_given(cluster, kind):
    """Run the workers until one of them has an instruction of this kind."""
    for _ in range(500):
        for name, worker in cluster.workers.items():
            if isinstance(worker.instruction, kind):
                return
            cluster.turn(name)
    raise AssertionError(f"No worker received {kind.__name__}; phase {cluster.coordinator.phase}.")


def lose(cluster):
    """Lose and restore the shards; return the samples to redo."""
    before = cluster.redone
    cluster.lose_shards()
    cluster.restore()
    return cluster.redone - before


# ---- suspended


def test_workers_wait_while_the_shards_are_away_and_their_reports_count():
    cluster = begun(job())
    turns(cluster, 4)
    samples = cluster.coordinator.run.training.book.samples_finished
    worker = cluster.workers[A]
    assert isinstance(worker.instruction, Work)
    worker.do()
    cluster.lose_shards()
    assert isinstance(worker.ask(), Wait)
    assert cluster.coordinator.run.training.book.samples_finished > samples
    assert cluster.coordinator.waiting_for() == ("shards",)
    assert not cluster.coordinator.recovery.begin_snapshot()


def test_no_epoch_begins_while_the_shards_are_away():
    cluster = RestorableCluster(job())
    cluster.join(2)
    cluster.lose_shards()
    cluster.coordinator.proceed(0)
    assert isinstance(cluster.workers[A].ask(), Wait)
    assert isinstance(cluster.workers[B].ask(), Wait)
    assert cluster.coordinator.phase == "hold"
    cluster.restore()
    assert cluster.redone == 0
    assert isinstance(cluster.workers[A].ask(), BeginEpoch)


def test_no_worker_is_given_up_while_the_shards_are_away_or_at_once_after():
    cluster = begun(job())
    turns(cluster, 3)
    cluster.lose_shards()
    cluster.clock.advance(1000)
    cluster.coordinator.tick()
    cluster.settle()
    assert cluster.of("stalled")[-1]["waiting_for"] == ["shards"]
    cluster.restore()
    cluster.coordinator.tick()
    cluster.settle()
    assert not cluster.of("worker_lost")
    cluster.clock.advance(61)
    cluster.coordinator.tick()
    cluster.settle()
    assert len(cluster.of("worker_lost")) == 2


def test_a_job_whose_workers_are_lost_with_the_shards_waits_for_others_after_the_return():
    cluster = begun(job(workers=1))
    turns(cluster, 3)
    cluster.lose_shards()
    cluster.kill(A)
    cluster.clock.advance(1000)
    cluster.coordinator.tick()
    cluster.restore()
    cluster.coordinator.tick()
    cluster.settle()
    assert not cluster.over
    cluster.join()
    cluster.run()
    assert cluster.rows_applied()[0].total() >= 20


def test_a_worker_that_leaves_while_the_shards_are_away_blocks_nothing():
    cluster = begun(job("bsp"))
    turns(cluster, 3)
    cluster.lose_shards()
    cluster.kill(A)
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20


def test_a_job_can_fail_while_the_shards_are_away():
    cluster = begun(job())
    cluster.lose_shards()
    cluster.coordinator.fail("the shards cannot be restored")
    cluster.settle()
    assert cluster.over
    assert isinstance(cluster.workers[A].ask(), Leave)
    cluster.restore()
    assert cluster.redone == 0


def test_a_second_loss_before_the_return_changes_nothing():
    cluster = begun(job())
    turns(cluster, 6)
    cluster.lose_shards()
    assert cluster.coordinator.recovery.lost("shard-1", "it was killed as well") is None
    cluster.restore()
    assert cluster.coordinator.recovery.called(1, answered=True) is None
    cluster.run()
    assert set(cluster.rows_applied()[0]) == {(0, row) for row in range(20)}


# ---- phases


def test_training_goes_back_to_the_snapshot():
    cluster = begun(job(samples=40))
    turns(cluster, 6)
    cluster.snapshot()
    kept = len(cluster.shards[0].lineage)
    turns(cluster, 4)
    finished = cluster.coordinator.run.training.book.samples_finished
    assert lose(cluster) == finished - 4 * kept > 0
    assert cluster.coordinator.run.training.book.samples_finished == 4 * kept
    cluster.run()
    assert cluster.of("epoch_end")[0]["samples"] == 40
    assert cluster.rows_applied()[0].total() == 40


def test_the_collection_of_states_goes_back_to_training_before_the_flush_is_confirmed():
    cluster = begun(job())
    reach(cluster, "collect")
    turns(cluster, 2, [A])
    assert lose(cluster) == 20
    assert cluster.coordinator.phase == "train"
    cluster.unflushed.clear()
    cluster.coordinator.flushed(0)  # the answer to the request before the loss
    reach(cluster, "collect")
    turns(cluster, 4)
    assert cluster.coordinator.waiting_for() == ("shards",)
    assert cluster.unflushed == [0]
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20


def test_an_answer_while_the_shards_are_away_does_not_count():
    cluster = begun(job())
    reach(cluster, "collect")
    turns(cluster, 4)
    cluster.lose_shards()
    cluster.unflushed.clear()
    cluster.coordinator.flushed(0)
    cluster.restore()
    assert cluster.coordinator.phase == "train"
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20


def test_a_request_that_was_not_read_yet_is_withdrawn():
    cluster = begun(job(workers=1))
    while cluster.coordinator.phase != "collect":
        cluster.coordinator.drain() and None
        worker = cluster.workers[A]
        worker.ask() if worker.instruction is None or isinstance(worker.instruction, Wait) else worker.do()
    cluster.lose_shards()
    assert FlushShards(0) not in cluster.effects
    cluster.restore()
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20


def test_states_are_collected_again_though_nothing_is_to_be_redone():
    cluster = begun(job())
    reach(cluster, "collect")
    recovery = cluster.coordinator.recovery
    assert recovery.begin_snapshot()
    assert recovery.adopt([], exact=True)
    recovery.end_snapshot(recorded=True)
    cluster.newest = [shard.copy() for shard in cluster.shards]
    assert lose(cluster) == 0
    assert cluster.coordinator.phase == "collect"
    assert cluster.unflushed == []
    instructions = [cluster.workers[name].ask() for name in (A, B)]
    assert all(isinstance(each, CollectState) for each in instructions)


def test_after_the_confirmed_flush_nothing_is_redone():
    cluster = begun(job(validation=8))
    while not cluster.unflushed:
        turns(cluster, 1)
    cluster.flush()
    assert lose(cluster) == 0
    reach(cluster, "validate")
    assert lose(cluster) == 0
    assert cluster.coordinator.phase == "validate"
    cluster.run()
    assert cluster.of("epoch_end")[0]["val_logs"] == {"rows": 8.0}
    assert cluster.rows_applied()[0].total() == 20


def test_rows_that_are_evaluated_when_the_shards_are_lost_are_evaluated_again():
    cluster = begun(job(validation=8))
    reach(cluster, "validate")
    until_given(cluster, Evaluate)
    lose(cluster)
    cluster.run()
    assert cluster.of("epoch_end")[0]["val_logs"] == {"rows": 8.0}


def test_a_loss_between_two_epochs_redoes_nothing():
    cluster = begun(job(epochs=2))
    end_epoch(cluster)
    assert lose(cluster) == 0
    cluster.run()
    assert {epoch: rows.total() for epoch, rows in cluster.rows_applied().items()} == {0: 20, 1: 20}


@pytest.mark.parametrize("preset", ["asgd", "bsp"])
def test_a_pause_for_the_client_stays_and_its_steps_are_counted_back(preset):
    cluster = begun(job(preset, workers=1, samples=40), until=4)
    turns(cluster, 30)
    assert cluster.coordinator.standing
    assert lose(cluster) == 16
    assert cluster.coordinator.standing
    assert cluster.coordinator.waiting_for() == ("client",)
    turns(cluster, 5)
    assert cluster.shards[0].lineage == []
    cluster.coordinator.proceed(0, 6)
    turns(cluster, 40)
    assert len(cluster.shards[0].lineage) == 6
    assert [e["steps"] for e in cluster.of("progress") if "pause" in e] == [4, 6]
    cluster.coordinator.proceed(0, None)
    cluster.run()
    assert cluster.rows_applied()[0].total() == 40


def test_a_pause_at_the_end_of_an_epoch_is_not_repeated():
    cluster = begun(job(workers=1), until=5)
    turns(cluster, 30)
    assert [(e["steps"], e["pause"]) for e in cluster.of("progress") if "pause" in e] == [(5, False)]
    assert lose(cluster) == 20
    cluster.coordinator.proceed(0, 6)
    cluster.run()
    assert len([e for e in cluster.of("progress") if "pause" in e]) == 1
    assert cluster.rows_applied()[0].total() == 20


def test_a_loss_while_states_are_collected_for_a_pause_trains_first():
    cluster = begun(job(workers=2, samples=40), until=4)
    until_given(cluster, CollectState)
    assert lose(cluster) == 16
    assert cluster.coordinator.phase == "train"
    turns(cluster, 30)
    assert cluster.coordinator.standing
    assert len(cluster.shards[0].lineage) == 4


def test_tasks_in_flight_are_leased_again():
    cluster = begun(job(workers=1, overrides={"overlap": 2}))
    for _ in range(100):
        if cluster.coordinator._members.get(A).in_flight:
            break
        turns(cluster, 1)
    assert lose(cluster) < 4 * len(cluster.pushes)
    assert cluster.coordinator._members.get(A).in_flight == frozenset()
    assert cluster.workers[A].ask().tasks[0].task == 0


def test_stopping_while_the_shards_are_away_redoes_what_was_trained_and_ends():
    cluster = begun(job(samples=60))
    turns(cluster, 8)
    finished = cluster.coordinator.run.training.book.samples_finished
    cluster.lose_shards()
    cluster.coordinator.stop_training()
    cluster.run()
    assert TrainingDone() in cluster.effects
    assert finished <= cluster.of("epoch_end")[0]["samples"] == cluster.rows_applied()[0].total() < 60


# ---- consistency


def test_the_staleness_bound_counts_from_the_return():
    cluster = begun(job("ssp", workers=2, samples=80, overrides={"staleness_bound": 1}))
    turns(cluster, 4)
    turns(cluster, 10, [A])
    assert isinstance(cluster.workers[A].instruction, Wait)
    lose(cluster)
    for name in (A, B):
        instruction = cluster.workers[name].ask()
        assert isinstance(instruction, Work)
        assert instruction.pull
    cluster.run()
    assert cluster.rows_applied()[0].total() == 80


# ---- snapshots


def test_no_round_begins_during_a_snapshot():
    cluster = begun(job("bsp"))
    until_given(cluster, Work)
    assert cluster.coordinator.recovery.begin_snapshot()
    assert cluster.coordinator.recovery.snapshot_step() == "wait"
    turns(cluster, 10)
    assert cluster.coordinator.recovery.snapshot_step() == "copy"
    pushes = len(cluster.pushes)
    turns(cluster, 5)
    assert len(cluster.pushes) == pushes > 0
    cluster.coordinator.recovery.go_on()
    cluster.coordinator.recovery.go_on()
    turns(cluster, 5)
    assert len(cluster.pushes) > pushes


def test_no_round_of_an_epoch_begins_during_a_snapshot_from_before_it():
    cluster = RestorableCluster(job("bsp"))
    cluster.join(2)
    cluster.snapshot(1)
    assert cluster.coordinator.recovery.snapshot_step() == "copy"
    cluster.coordinator.proceed(0)
    turns(cluster, 10)
    assert cluster.coordinator.phase == "train"
    assert cluster.pushes == []
    cluster.coordinator.recovery.go_on()
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20


def test_a_loss_ends_the_snapshot():
    cluster = begun(job("bsp"))
    turns(cluster, 5)
    cluster.snapshot(1)
    lose(cluster)
    pushes = len(cluster.pushes)
    turns(cluster, 10)
    assert len(cluster.pushes) > pushes
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20


def test_a_pause_can_begin_during_a_snapshot():
    cluster = begun(job("bsp", samples=40), until=1)
    until_given(cluster, Work)
    assert cluster.coordinator.recovery.begin_snapshot()
    turns(cluster, 20)
    assert cluster.coordinator.standing


# ---- progress and restart


def test_progress_is_that_of_the_current_epoch():
    cluster = begun(job(epochs=2))
    cluster.keeps = False
    assert RestorableCluster(job()).coordinator.recovery.progress() is None
    assert cluster.coordinator.recovery.progress() is None
    turns(cluster, 3)
    assert cluster.coordinator.recovery.progress() == EpochProgress(epoch=0, rows=((0, 0, 0),), task=5)
    turns(cluster, 4)
    cluster.snapshot()
    assert cluster.coordinator.recovery.progress().samples == 4 * len(cluster.newest[1].lineage) > 0
    reach(cluster, "hold")
    assert cluster.coordinator.recovery.progress() == EpochProgress(epoch=1, rows=((1, 0, 0),), task=5)


def test_progress_is_complete_once_the_shards_are_flushed():
    cluster = begun(job())
    reach(cluster, "collect")
    assert cluster.coordinator.recovery.progress().samples == 0
    while not cluster.unflushed:
        turns(cluster, 1)
    cluster.coordinator.flushed(0)
    assert cluster.coordinator.recovery.progress() == EpochProgress(epoch=0, samples=20, rows=((0, 0, 20),), task=5)


def test_progress_between_two_epochs_names_the_last_round():
    cluster = begun(job("bsp", epochs=2))
    end_epoch(cluster)
    assert cluster.coordinator.recovery.progress() == EpochProgress(epoch=1, rows=((1, 0, 0),), round=3, task=6)


def test_streams_and_jobs_without_snapshots_have_no_progress():
    stream = RestorableCluster(job(stream=True), [b"x"])
    stream.join(2)
    stream.coordinator.proceed(0)
    spec = job()
    coordinator = Coordinator(spec, make_policy(spec.algorithm), ManualClock())
    coordinator.joined(A, 0)
    coordinator.joined(B, 1)
    coordinator.proceed(0)
    for name in (A, B):
        coordinator.next(name, Report())
    for each in (stream.coordinator, coordinator):
        turns(stream, 2)
        assert each.phase == "train"
        assert each.recovery.progress() is None


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("preset", ["asgd", "bsp"])
def test_a_restarted_job_trains_the_rest_of_its_epoch(preset, steps):
    first = begun(job(preset, samples=40, epochs=4, steps_per_epoch=steps))
    end_epoch(first)
    first.proceed()
    first.snapshot()
    for _ in range(100):
        if (first.coordinator.recovery.progress() or EpochProgress(epoch=1)).samples:
            break
        first.turn(A)
        first.turn(B)
        first.snapshot()
    progress = first.coordinator.recovery.progress()
    assert 0 < progress.samples < 40
    assert progress.round == first.newest[0].closed_round
    assert (progress.round > 0) == (preset == "bsp")
    fit = {"initial_epoch": 1, "begun": progress.model_copy(update={"records": "0" * 64})}
    second = begun(job(preset, samples=40, epochs=4, steps_per_epoch=steps, **fit))
    turns(second, 1)
    begun_again = second.coordinator.recovery.progress()
    assert begun_again.model_copy(update={"task": progress.task}) == progress
    assert begun_again.task > progress.task  # no number is given twice
    assert not second.coordinator.fresh
    second.run()
    first.lineage = [push for push in first.newest[0].lineage if push.epoch == 1]
    kept = {row for push in first.lineage for row in first.rows(push.task)}
    rest = second.rows_applied()
    assert not kept & set(rest[1])
    first.run()
    assert kept | set(rest[1]) == set(first.rows_applied()[1])
    assert {epoch: set(rows) for epoch, rows in rest.items() if epoch > 1} == {
        epoch: set(rows) for epoch, rows in first.rows_applied().items() if epoch > 1
    }
    ends = [(end["samples"], end["steps"]) for end in first.of("epoch_end")[1:]]
    assert [(end["samples"], end["steps"]) for end in second.of("epoch_end")] == ends


def test_a_restarted_job_whose_epoch_is_trained_validates_it():
    progress = EpochProgress(epoch=0, samples=20, rows=((0, 0, 20),))
    cluster = begun(job(validation=8, begun=progress))
    cluster.run()
    assert cluster.pushes == []
    (end,) = cluster.of("epoch_end")
    assert (end["samples"], end["steps"], end["val_logs"]) == (20, 5, {"rows": 8.0})


@pytest.mark.parametrize("batch", ["fixed", "dbs"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("records", ["", "0" * 64])
def test_rounds_go_on_with_the_next_number_if_the_shards_have_records(batch, workers, records):
    begun_with = EpochProgress(epoch=0, samples=12, rows=((0, 0, 12),), round=9, records=records)
    cluster = RestorableCluster(job("bsp", workers=workers, epochs=2, begun=begun_with, overrides={"batch": batch}))
    first = 10 if records else 1
    cluster.shards = [SimulatedShard(closed_round=first - 1) for _ in range(2)]
    cluster.join(workers)
    cluster.coordinator.proceed(0)
    cluster.run()
    rounds = sorted({push.task.round for push in cluster.shards[0].lineage})
    assert rounds == list(range(first, first + len(rounds)))
    assert {epoch: rows.total() for epoch, rows in cluster.rows_applied().items()} == {0: 8, 1: 20}


def test_progress_of_another_epoch_is_ignored():
    cluster = begun(job(begun=EpochProgress(epoch=1, samples=20, rows=((1, 0, 20),))))
    cluster.run()
    assert cluster.rows_applied()[0].total() == 20
