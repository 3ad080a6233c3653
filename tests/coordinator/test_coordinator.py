"""Single decisions of the coordinator."""

import numpy as np
import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.order import order_crc, sample_order
from nfdt.core.work.instructions import (
    BeginEpoch,
    CollectState,
    EpochDone,
    Evaluate,
    Failed,
    FlushShards,
    ForgetWorker,
    GiveUp,
    Leave,
    Report,
    Summarise,
    TrainingDone,
    Wait,
    Work,
)
from nfdt.model.training.merge import decode_arrays
from tests.support.simulated_cluster import SimulatedCluster, job, started

A, B = "worker-0", "worker-1"


def until(cluster, kind, names=None):
    """Run the workers until one of them receives an instruction of ``kind``; return its name and the instruction."""
    for _ in range(2000):
        for name in names or list(cluster.workers):
            worker = cluster.workers[name]
            if isinstance(worker.instruction, kind):
                return name, worker.instruction
            cluster.turn(name)
        cluster.flush()
        if cluster.batches:
            cluster.feed()
    raise AssertionError(f"No worker received {kind.__name__}; phase {cluster.coordinator.phase}.")


# ---- start of a job


@pytest.mark.parametrize(("epochs", "initial"), [(0, 0), (3, 3), (2, 5)])
def test_no_epochs_to_train_is_done_at_once(epochs, initial):
    cluster = SimulatedCluster(job(epochs=epochs, initial_epoch=initial))
    assert cluster.effects == [TrainingDone()]
    cluster.join()
    assert isinstance(cluster.workers[A].ask(), Leave)


def test_a_resumed_job_begins_at_its_initial_epoch_in_that_epochs_order():
    cluster = started(job(epochs=5, initial_epoch=3, workers=1, seed=7))
    begin = cluster.workers[A].ask()
    assert begin == BeginEpoch(3, b"", order_crc(sample_order(20, True, 7, 0)))
    cluster.run()
    assert {epoch: {row[0] for row in rows} for epoch, rows in cluster.trained.items()} == {3: {3}, 4: {4}}
    assert [e["epoch"] for e in cluster.of("epoch_end")] == [3, 4]


def test_nothing_begins_before_the_client_permits_it():
    cluster = SimulatedCluster(job())
    cluster.join(2)
    assert isinstance(cluster.workers[A].ask(), Wait)
    assert isinstance(cluster.workers[B].ask(), Wait)
    assert cluster.coordinator.waiting_for() == ("client",)
    cluster.coordinator.proceed(0)
    assert isinstance(cluster.workers[A].ask(), BeginEpoch)


def test_nothing_begins_before_every_worker_is_ready():
    cluster = started(job(workers=2))
    assert isinstance(cluster.workers[A].ask(), Wait)
    assert cluster.coordinator.waiting_for() == ("workers",)
    assert isinstance(cluster.workers[B].ask(), BeginEpoch)
    assert isinstance(cluster.workers[A].ask(), BeginEpoch)


def test_workers_that_do_not_come_are_not_waited_for_beyond_the_start_timeout():
    cluster = SimulatedCluster(job(workers=3, interactive=False))
    cluster.join()
    assert isinstance(cluster.workers[A].ask(), Wait)
    cluster.clock.advance(20)
    cluster.coordinator.tick()
    assert isinstance(cluster.workers[A].ask(), BeginEpoch)


def test_a_worker_lost_before_the_start_is_not_waited_for():
    cluster = started(job(workers=2))
    cluster.kill(B)
    assert isinstance(cluster.workers[A].ask(), BeginEpoch)


def test_the_next_epoch_waits_for_the_client_if_there_is_one():
    for interactive in (True, False):
        cluster = started(job(workers=1, epochs=2, interactive=interactive))
        name, _ = until(cluster, Summarise)
        cluster.turn(name)
        cluster.turn(name)
        assert cluster.coordinator.phase == ("hold" if interactive else "train")
        cluster.coordinator.proceed(1)
        assert cluster.coordinator.phase == "train"


# ---- end of an epoch


def test_the_events_of_a_small_job_in_order():
    cluster = started(job(workers=1, samples=8, validation=5))
    cluster.run()
    kinds = [kind for kind, _ in cluster.events]
    assert kinds == ["worker_joined", "epoch_begin", "progress", "progress", "epoch_end"]
    end = cluster.of("epoch_end")[0]
    assert end == {
        "epoch": 0,
        "logs": {"seen": 8.0, "loss": 0.0},
        "val_logs": {"rows": 5.0},
        "seconds": pytest.approx(0.1, abs=0.1),
        "steps": 2,
        "samples": 8,
    }
    rest = [e for e in cluster.effects if not hasattr(e, "kind")]
    assert rest == [FlushShards(0), EpochDone(0), TrainingDone()]


def test_validation_waits_until_the_shards_are_flushed():
    cluster = started(job(workers=1, validation=5))
    worker = cluster.workers[A]
    while not isinstance(worker.instruction, CollectState):
        cluster.turn(A)
    cluster.turn(A)
    assert isinstance(worker.ask(), Wait)
    assert cluster.coordinator.waiting_for() == ("shards",)
    cluster.coordinator.flushed(7)
    assert isinstance(worker.ask(), Wait)
    cluster.coordinator.flushed(0)
    assert isinstance(worker.ask(), Evaluate)


@pytest.mark.parametrize(("freq", "epochs"), [(1, [0, 1, 2, 3]), (2, [1, 3]), ((1, 4), [0, 3])])
def test_validation_follows_its_frequency(freq, epochs):
    cluster = started(job(epochs=4, validation=5, validation_freq=freq))
    cluster.run()
    assert [e["epoch"] for e in cluster.of("epoch_end") if e["val_logs"]] == epochs


def test_validation_steps_and_batch_size_limit_the_rows():
    cluster = started(job(validation=50, validation_batch_size=3, validation_steps=4))
    cluster.run()
    assert cluster.of("epoch_end")[0]["val_logs"] == {"rows": 12.0}


def test_untrained_state_is_merged_by_steps_and_given_to_all():
    cluster = started(job(workers=2, samples=12, epochs=2))
    cluster.run()
    steps = [sum(1 for name, task in cluster.pushes if name == w and task.pass_index == 0) for w in (A, B)]
    for worker in cluster.workers.values():
        (_, first), (_, second) = worker.begun
        assert first == b""
        assert decode_arrays(second)[0] == pytest.approx([steps[1] / 3])


def test_what_a_callback_sets_is_where_the_next_epoch_starts():
    cluster = started(job(workers=1, epochs=2))
    until(cluster, Summarise)
    cluster.turn(A)
    cluster.turn(A)
    cluster.merger.replace([np.array([42.0])])
    cluster.run()
    assert decode_arrays(cluster.workers[A].begun[1][1])[0] == [42.0]


def test_running_logs_are_weighted_by_samples():
    cluster = started(job(workers=2, samples=12))
    cluster.run()
    shares = [sum(t.samples for n, t in cluster.pushes if n == w) for w in (A, B)]
    assert cluster.of("progress")[-1]["logs"] == {"loss": pytest.approx(shares[1] / 12)}


def test_progress_is_reported_at_most_ten_times_a_second_and_at_the_end():
    cluster = started(job(workers=1, samples=400))
    cluster.run()
    events = cluster.of("progress")
    assert events[-1]["steps"] == 100
    assert events[-1]["samples"] == 400
    assert len(events) <= cluster.clock.now() / 0.1 + 2


# ---- losses


def test_a_worker_that_is_excused_is_not_silent():
    cluster = started(job(workers=2))
    until(cluster, Work, [A, B])
    cluster.clock.advance(59)
    cluster.coordinator.excuse(A)
    cluster.coordinator.excuse("unknown")
    cluster.clock.advance(2)
    cluster.coordinator.tick()
    cluster.settle()
    assert [e["worker"] for e in cluster.of("worker_lost")] == [B]


def test_a_lost_worker_is_reported_with_what_goes_back():
    cluster = started(job(workers=2))
    until(cluster, Work, [A, B])
    cluster.kill(A, "the process ended")
    assert cluster.of("worker_lost") == [{"worker": A, "reason": "the process ended", "requeued": 1}]
    assert ForgetWorker(A, (1,)) in cluster.effects
    cluster.coordinator.left(A, "again")
    assert len(cluster.of("worker_lost")) == 1
    assert isinstance(cluster.coordinator.next(A), Leave)


def test_a_lost_worker_reports_too_late():
    cluster = started(job(workers=2))
    name, work = until(cluster, Work)
    cluster.kill(name)
    late = cluster.coordinator.next(name, Report(tuple(t.task for t in work.tasks)))
    assert isinstance(late, Leave)
    cluster.run()
    assert cluster.of("epoch_end")[0]["samples"] == 20


def test_a_lost_worker_holds_no_other_back():
    cluster = started(job("ssp", workers=2, samples=200))
    cluster.turn(A)
    until(cluster, Work, [B])
    for _ in range(100):
        cluster.turn(A)
    assert isinstance(cluster.workers[A].instruction, Wait)
    cluster.kill(B)
    until(cluster, Work, [A])


def test_another_process_of_a_worker_is_instructed_to_begin_the_epoch():
    cluster = started(job(workers=1))
    until(cluster, Work, [A])
    cluster.coordinator.resumed(A, {"pid": 7})
    assert isinstance(cluster.coordinator.next(A), BeginEpoch)


@pytest.mark.parametrize("kind", [CollectState, Evaluate, Summarise])
def test_a_worker_lost_at_the_epochs_end_is_replaced_by_the_others(kind):
    cluster = started(job(workers=3, validation=9))
    name, _ = until(cluster, kind)
    cluster.kill(name)
    cluster.run()
    assert cluster.of("epoch_end")[0]["val_logs"] == {"rows": 9.0}


@pytest.mark.parametrize("kind", [Work, CollectState, Evaluate, Summarise])
def test_a_new_worker_can_end_an_epoch_that_all_others_have_left(kind):
    cluster = started(job(workers=2, validation=9))
    until(cluster, kind)
    cluster.kill(A)
    cluster.kill(B)
    cluster.join()
    cluster.run()
    assert cluster.of("epoch_end")[0]["val_logs"] == {"rows": 9.0}


def test_a_worker_that_asks_before_it_has_done_its_work_gets_the_same_instruction_again():
    cluster = started(job(workers=1, validation=5))
    for kind in (Work, CollectState, Evaluate, Summarise):
        name, instruction = until(cluster, kind)
        assert cluster.coordinator.next(name) == instruction
        cluster.turn(name)


def test_an_answer_about_other_rows_than_were_asked_is_not_taken():
    cluster = started(job(workers=1, validation=5))
    name, instruction = until(cluster, Evaluate)
    worker = cluster.workers[name]
    worker.do()
    worker.report = Report(evaluated=type(worker.report.evaluated)(0, (instruction.tasks[0].task, 99), b"junk"))
    assert worker.ask() == instruction


def test_connecting_again_is_a_loss_and_a_new_beginning():
    cluster = started(job(workers=2))
    until(cluster, Work, [A, B])
    cluster.coordinator.joined(A, 0)
    cluster.settle()
    assert cluster.of("worker_lost")[0]["requeued"] == 1
    cluster.workers[A].instruction = None
    assert isinstance(cluster.workers[A].ask(), BeginEpoch)
    cluster.run()


def test_leaving_at_the_end_is_no_loss():
    cluster = started(job(workers=2))
    cluster.run()
    assert cluster.all_left()
    cluster.kill(A)
    assert cluster.of("worker_lost") == []


# ---- time


def test_a_silent_worker_is_given_up_and_its_work_done_by_others():
    cluster = started(job(workers=2))
    name, _ = until(cluster, Work, [A, B])
    other = B if name == A else A
    for _ in range(7):
        cluster.clock.advance(10)
        if isinstance(cluster.workers[other].instruction, Wait):
            cluster.workers[other].ask()
        else:
            cluster.turn(other)
        cluster.coordinator.tick()
        cluster.settle()
    assert [e for e in cluster.effects if isinstance(e, GiveUp)] == [GiveUp(name, "it was silent for more than 60 s")]
    del cluster.workers[name]
    cluster.run()
    assert cluster.of("epoch_end")[0]["samples"] == 20


@pytest.mark.parametrize(("signs", "lost"), [(True, 0), (False, 1)])
def test_a_long_validation_is_given_up_only_if_it_makes_no_headway(signs, lost):
    cluster = started(job(workers=1, validation=40))
    name, instruction = until(cluster, Evaluate)
    for _ in range(10):
        cluster.clock.advance(20)
        if signs:
            assert cluster.coordinator.next(name, Report(busy=True)) == Wait()
        cluster.coordinator.tick()
        cluster.settle()
    assert len([e for e in cluster.effects if isinstance(e, GiveUp)]) == lost
    assert lost or cluster.coordinator.next(name) == instruction


def test_a_heartbeat_changes_nothing_else():
    cluster = started(job(workers=1, overrides={"overlap": 1}, samples=40))
    worker = cluster.workers[A]
    while not worker.in_flight:
        cluster.turn(A)
    instruction = worker.ask()
    cluster.coordinator.next(A, Report(busy=True))
    assert cluster.coordinator.next(A) == instruction


def test_a_worker_that_sends_a_heartbeat_to_a_job_that_has_ended_is_instructed_to_leave():
    cluster = started(job(workers=1))
    cluster.coordinator.fail("the disk is full")
    assert isinstance(cluster.coordinator.next(A, Report(busy=True)), Leave)


def test_the_job_fails_when_all_workers_are_gone_and_none_comes():
    cluster = started(job(workers=1))
    cluster.kill(A, "out of memory")
    cluster.clock.advance(19)
    cluster.coordinator.tick()
    cluster.settle()
    assert not cluster.over
    cluster.clock.advance(1)
    cluster.coordinator.tick()
    cluster.settle()
    (failed,) = [e for e in cluster.effects if isinstance(e, Failed)]
    assert "worker-0: out of memory" in failed.reason
    assert "20 s" in failed.reason
    cluster.join()
    assert isinstance(cluster.workers[B].ask(), Leave)


def test_the_job_fails_when_no_worker_ever_comes():
    cluster = SimulatedCluster(job())
    cluster.clock.advance(20)
    cluster.coordinator.tick()
    cluster.settle()
    assert "No worker has joined" in cluster.effects[-1].reason


def test_a_worker_that_comes_back_in_time_saves_the_job():
    cluster = started(job(workers=1))
    cluster.kill(A)
    cluster.clock.advance(19)
    cluster.join()
    cluster.clock.advance(19)
    cluster.coordinator.tick()
    cluster.run()
    assert cluster.of("epoch_end")


def test_a_stall_names_the_missing_workers_and_the_time_at_doubling_intervals():
    cluster = started(job(workers=1))
    until(cluster, Work, [A])
    seconds = []
    for second in range(1, 59):
        cluster.clock.advance(1)
        cluster.coordinator.tick()
        cluster.settle()
        seconds += [second] * (len(cluster.of("stalled")) - len(seconds))
    assert seconds == [15, 30]
    assert cluster.of("stalled")[0]["waiting_for"] == [A]
    assert cluster.of("stalled")[0]["since_s"] == pytest.approx(15, abs=0.1)


def test_waiting_for_the_client_is_no_stall():
    cluster = SimulatedCluster(job(workers=1))
    cluster.join()
    for _ in range(50):
        cluster.clock.advance(1)
        cluster.workers[A].ask()
        cluster.coordinator.tick()
    cluster.settle()
    assert cluster.of("stalled") == []


def test_a_failed_job_sends_its_workers_the_reason():
    cluster = started(job())
    cluster.coordinator.fail("the disk is full")
    cluster.coordinator.fail("once more")
    cluster.settle()
    assert [e for e in cluster.effects if isinstance(e, Failed)] == [Failed("the disk is full")]
    assert cluster.workers[A].ask() == Leave("The job has failed: the disk is full")


# ---- leases


def test_leases_grow_once_steps_are_measured_but_not_for_bounded_policies():
    for preset, grows in {"asgd": True, "ssp": False, "n-softsync": False, "bsp": False}.items():
        cluster = started(job(preset, workers=1, samples=4000))
        sizes = []
        while cluster.coordinator.phase != "collect":
            cluster.turn(A)
            if isinstance(cluster.workers[A].instruction, Work):
                sizes.append(len(cluster.workers[A].instruction.tasks))
            cluster.clock.advance(0.005)
        assert sizes[:2] == [1, 1]
        assert (max(sizes) > 1) == grows
        assert sizes[-1] == 1


def test_rows_to_validate_are_asked_for_in_pieces_of_about_a_second():
    cluster = started(job(workers=1, validation=4000))
    name, instruction = until(cluster, Evaluate)
    sizes = []
    while cluster.coordinator.phase == "validate":
        if isinstance(instruction, Evaluate):
            sizes.append(len(instruction.tasks))
            cluster.clock.advance(0.1 * sizes[-1])  # a batch takes 0.1 s
        cluster.turn(name)
        instruction = cluster.workers[name].instruction
    assert sizes[0] == 1
    assert max(sizes) == 10
    assert sum(sizes) == 1000


def test_static_tasks_are_contiguous_shares():
    cluster = started(job(workers=2, samples=40, overrides={"tasks": "static"}))
    cluster.run()
    rows = {w: sorted(t.start for n, t in cluster.pushes if n == w) for w in (A, B)}
    assert max(rows[A]) < min(rows[B])


def test_a_synchronous_round_has_a_part_for_every_ready_worker():
    cluster = started(job("bsp", workers=3, samples=26))
    cluster.run()
    assert {t.parts for _, t in cluster.pushes if t.round < 3} == {3}
    assert [t.samples for _, t in cluster.pushes if t.round == 3] == [2]
    assert cluster.of("epoch_begin")[0]["steps"] == cluster.of("epoch_end")[0]["steps"] == 3
    for index, name in enumerate(("worker-0", "worker-1", "worker-2")):
        assert {t.part for n, t in cluster.pushes if n == name and t.parts == 3} == {index}


# ---- streams


def test_the_feed_is_bounded_and_reports_its_credit():
    cluster = started(job(stream=True, workers=1))
    assert cluster.coordinator.feed_credit.total == 4
    for free in (4, 3, 2, 1):
        assert cluster.coordinator.feed_credit.free == free
        cluster.coordinator.fed(0, b"x", 4)
    with pytest.raises(ProtocolError, match="credit"):
        cluster.coordinator.fed(0, b"x", 4)
    until(cluster, Work)
    assert (cluster.coordinator.feed_credit.total, cluster.coordinator.feed_credit.free) == (5, 1)


def test_batches_may_come_before_the_workers_are_ready():
    cluster = SimulatedCluster(job(stream=True, workers=1))
    cluster.coordinator.fed(0, b"x", 4)
    cluster.coordinator.feed_ended(0)
    cluster.join()
    cluster.coordinator.proceed(0)
    cluster.run()
    assert cluster.of("epoch_end")[0]["samples"] == 4
    assert cluster.of("epoch_begin") == [{"epoch": 0, "steps": None}]


def test_batches_of_an_epoch_that_is_over_are_dropped():
    cluster = started(job(stream=True, workers=1, epochs=2), [b"x"])
    until(cluster, Work)
    cluster.coordinator.stop_training()
    for _ in range(20):
        cluster.coordinator.fed(0, b"late", 4)
    cluster.run()
    cluster.coordinator.fed(0, b"later", 4)
    assert cluster.coordinator.feed_credit.free == 0
    assert set(cluster.trained[0]) == {b"x"}


def test_a_slow_feed_is_the_clients_and_no_stall():
    cluster = started(job(stream=True, workers=1))
    for _ in range(5):
        cluster.turn(A)
    assert cluster.coordinator.waiting_for() == ("client",)


def test_a_feed_that_no_worker_takes_from_waits_for_workers():
    cluster = started(job(stream=True, workers=1))
    for _ in range(5):
        cluster.turn(A)
    cluster.kill(A)
    assert cluster.coordinator.waiting_for() == ("workers",)


def test_the_validation_of_a_fed_job_waits_for_no_client():
    cluster = started(job(stream=True, workers=1, validation=5), [b"x"])
    until(cluster, Evaluate)
    cluster.coordinator.left(A, "killed")
    cluster.join()
    assert cluster.coordinator.waiting_for() == ("workers",)


def test_numbers_of_fed_tasks_never_repeat_within_the_job():
    cluster = started(job("bsp", stream=True, workers=2, epochs=3), [b"%d" % i for i in range(5)])
    cluster.run()
    numbers = [t.task for _, t in cluster.pushes]
    assert sorted(numbers) == list(range(15))
    assert sorted({t.round for _, t in cluster.pushes}) == list(range(1, 10))
