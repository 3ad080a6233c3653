"""Workers that leave, return as another process, or are replaced by others between two epochs."""

from __future__ import annotations

import pytest

from nfdt.core.work.instructions import BeginEpoch, Evaluate, ForgetWorker, Leave, Report, Summarise, Wait, Work
from nfdt.schedulers.group_shares import FixedSizes
from tests.support.simulated_cluster import SimulatedCluster, job, started

A, B = "worker-0", "worker-1"


def until_work(cluster: SimulatedCluster, name: str) -> Work:
    worker = cluster.workers[name]
    while not isinstance(worker.instruction, Work):
        cluster.turn(name)
    return worker.instruction


def at_the_end_of_the_first_epoch(spec) -> SimulatedCluster:
    cluster = started(spec)
    for _ in range(500):
        for name in list(cluster.workers):
            summarised = isinstance(cluster.workers[name].instruction, Summarise)
            cluster.turn(name)
            if summarised:
                cluster.turn(name)
                assert cluster.coordinator.phase == "hold"
                return cluster
        cluster.flush()
    raise AssertionError(f"The epoch does not end; phase {cluster.coordinator.phase}.")


def test_a_worker_lost_before_anything_is_trained_has_nothing_to_give_back():
    cluster = SimulatedCluster(job(workers=2))
    cluster.join(2)
    cluster.kill(B, "killed")
    assert cluster.of("worker_lost") == [{"worker": B, "reason": "killed", "requeued": 0}]
    assert cluster.effects[-1] == ForgetWorker(B)


def test_an_unknown_worker_loses_and_resumes_nothing():
    cluster = SimulatedCluster(job(workers=2))
    cluster.coordinator.left("unknown", "killed")
    cluster.coordinator.resumed("unknown", {"pid": 7})
    assert cluster.coordinator.drain() == []


def test_another_process_of_a_worker_goes_on_with_its_tasks():
    cluster = started(job(workers=2))
    cluster.turn(B)
    work = until_work(cluster, A)
    cluster.coordinator.resumed(A, {"pid": 7, "host": "b"})
    cluster.settle()
    assert cluster.of("worker_joined")[-1] == {"worker": A, "index": 0, "pid": 7, "host": "b"}
    assert cluster.of("worker_lost") == []
    worker = cluster.workers[A]
    instructions = [cluster.coordinator.next(A) for _ in range(2)]
    assert isinstance(instructions[0], BeginEpoch)
    assert instructions[1].tasks == work.tasks
    worker.instruction = instructions[1]
    cluster.run()
    assert set(cluster.trained[0].values()) == {1}


def test_a_worker_that_is_taken_over_is_not_silent():
    cluster = started(job(workers=1))
    until_work(cluster, A)
    cluster.clock.advance(59)
    cluster.coordinator.resumed(A, {})
    cluster.clock.advance(59)
    cluster.coordinator.tick()
    cluster.settle()
    assert cluster.of("worker_lost") == []


def test_workers_that_give_way_between_two_epochs_are_no_loss():
    cluster = at_the_end_of_the_first_epoch(job(workers=2, epochs=2))
    cluster.coordinator.retire_all()
    cluster.settle()
    assert {e for e in cluster.effects if isinstance(e, ForgetWorker)} == {ForgetWorker(A), ForgetWorker(B)}
    assert cluster.of("worker_lost") == []
    assert isinstance(cluster.coordinator.next(A), Leave)


def test_the_next_epoch_waits_for_as_many_as_are_expected():
    cluster = at_the_end_of_the_first_epoch(job(workers=2, epochs=2))
    cluster.coordinator.retire_all()
    cluster.workers.clear()
    cluster.coordinator.expect(3)
    cluster.coordinator.proceed(1)
    cluster.join(3)
    instructions = [worker.ask() for worker in cluster.workers.values()]
    assert [type(each) for each in instructions] == [Wait, Wait, BeginEpoch]
    assert instructions[2].epoch == 1


def test_others_take_the_sizes_that_were_stated_for_them():
    spec = job(workers=2, epochs=2, samples=40)
    cluster = at_the_end_of_the_first_epoch(spec)
    cluster.coordinator.retire_all()
    cluster.workers.clear()
    sizes = FixedSizes(4)
    sizes.state({"worker-2": 7, "worker-3": 3})
    cluster.coordinator.renew(spec, sizes)
    cluster.proceed()
    cluster.join(2)
    cluster.run()
    taken = {name: {task.samples for n, task in cluster.pushes if n == name} for name in ("worker-2", "worker-3")}
    assert max(taken["worker-2"]) == 7
    assert max(taken["worker-3"]) == 3
    assert set(cluster.trained[1].values()) == {1}


def test_everything_is_handed_out_when_no_worker_can_be_given_more():
    cluster = started(job(workers=2, samples=8))
    assert not cluster.coordinator.handed_out  # no worker trains yet
    cluster.turn(B)
    until_work(cluster, A)
    assert not cluster.coordinator.handed_out
    until_work(cluster, B)
    assert cluster.coordinator.handed_out
    cluster.kill(A)
    assert not cluster.coordinator.handed_out


def test_an_epoch_is_fresh_until_something_of_it_is_trained():
    cluster = started(job(workers=1, epochs=2))
    assert cluster.coordinator.fresh
    until_work(cluster, A)
    assert cluster.coordinator.fresh
    cluster.turn(A)
    cluster.turn(A)
    assert not cluster.coordinator.fresh


@pytest.mark.parametrize(("preset", "workers", "total"), [("asgd", 1, 4), ("asgd", 3, 8), ("bsp", 3, 8)])
def test_a_client_may_feed_two_batches_ahead_of_each_worker_and_two_more(preset, workers, total):
    cluster = started(job(preset, stream=True, workers=workers))
    assert cluster.coordinator.feed_credit.total == cluster.coordinator.feed_credit.free == total
    cluster.coordinator.fed(0, b"x", 4)
    assert (cluster.coordinator.feed_credit.total, cluster.coordinator.feed_credit.free) == (total, total - 1)


def test_a_stream_has_no_order_that_workers_could_check():
    assert started(job(stream=True, workers=1)).workers[A].ask() == BeginEpoch(0, b"", 0)


def test_data_that_no_client_feeds_have_no_credit():
    credit = started(job(workers=1)).coordinator.feed_credit
    assert (credit.epoch, credit.total, credit.free) == (0, 0, 0)


def test_what_is_known_of_speeds_outlives_the_workers():
    cluster = started(job(workers=2, samples=400))
    assert cluster.coordinator.measured() == {}
    cluster.run()
    assert set(cluster.coordinator.measured()) == {A, B}
    cluster.kill(B)
    assert set(cluster.coordinator.measured()) == {A, B}


def test_an_epoch_is_validated_on_the_state_that_was_merged_at_its_end():
    cluster = started(job(workers=1, epochs=2, validation=5))
    validated = {}
    while not cluster.over:
        instruction = cluster.workers[A].instruction
        if isinstance(instruction, Evaluate):
            validated[instruction.epoch] = instruction.untrained
            assert instruction.untrained == cluster.merger.encoded != b""
        cluster.turn(A)
        cluster.flush()
        cluster.proceed()
    assert sorted(validated) == [0, 1]


def test_a_resumed_job_of_counted_steps_begins_with_the_first_pass():
    cluster = started(job(workers=1, epochs=5, initial_epoch=3, steps_per_epoch=2))
    cluster.run()
    assert sorted(cluster.trained[3]) == [(0, row) for row in range(8)]
    assert sorted(cluster.trained[4]) == [(0, row) for row in range(8, 16)]
    assert {event["epoch"] for event in cluster.of("progress")} == {3, 4}


def test_an_empty_report_changes_nothing():
    cluster = started(job(workers=1))
    work = until_work(cluster, A)
    assert cluster.coordinator.next(A, Report()) == work
    assert cluster.coordinator.fresh
