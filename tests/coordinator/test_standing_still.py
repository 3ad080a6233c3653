"""Pauses of an epoch for its client: at chosen steps, and at its end."""

import numpy as np
import pytest

from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.work.instructions import BeginEpoch, CollectState, TrainingDone, Wait, Work
from nfdt.jobserver.job_core import ClientControl
from nfdt.model.training.merge import decode_arrays
from tests.support.simulated_cluster import SimulatedCluster, job

A, B = "worker-0", "worker-1"


def begun(spec, until, batches=None):
    """Return a cluster whose first epoch may be trained up to a step."""
    cluster = SimulatedCluster(spec, batches)
    cluster.join(spec.cluster.workers)
    cluster.coordinator.proceed(spec.fit.initial_epoch, until)
    cluster.settle()
    return cluster


def turns(cluster, count=30, names=None):
    """Let all workers execute their instructions and ask, ``count`` times; advance the clock."""
    for _ in range(count):
        for name in list(names or cluster.workers):
            cluster.turn(name)
        cluster.flush()
        cluster.clock.advance(0.01)


def pauses(cluster):
    """Return (steps, whether another follows) for each request to the client."""
    return [(e["steps"], e["pause"]) for e in cluster.of("progress") if "pause" in e]


def run(cluster, by=1, most=2000):
    """Run to the end of the job, ``by`` steps at a time; return (epoch, steps) of each pause."""
    epoch, stood = cluster.coordinator.epoch, []
    until = by
    for _ in range(most):
        if cluster.over:
            return stood
        turns(cluster, 1)
        if cluster.spec.train.kind == "stream":
            cluster.feed()
        if cluster.coordinator.standing:
            stood.append((epoch, cluster.coordinator.run.training.book.steps_finished))
            until = stood[-1][1] + by
            cluster.coordinator.proceed(epoch, until)
        elif cluster.coordinator.phase == "hold":
            epoch, until = cluster.coordinator.epoch, by
            cluster.coordinator.proceed(epoch, until)
        cluster.settle()
    raise AssertionError(f"The job hangs in {cluster.coordinator.phase}, for {cluster.coordinator.waiting_for()}.")


def test_one_step_is_trained_and_then_all_workers_wait():
    cluster = begun(job(workers=2), until=1)
    turns(cluster)
    assert len(cluster.pushes) == 1
    assert pauses(cluster) == [(1, True)]
    assert cluster.coordinator.standing
    assert isinstance(cluster.workers[A].ask(), Wait)
    assert isinstance(cluster.workers[B].ask(), Wait)


def test_waiting_for_the_client_is_no_stall():
    cluster = begun(job(workers=2), until=1)
    turns(cluster)
    for _ in range(5):
        cluster.clock.advance(10)
        turns(cluster, 1)
        cluster.coordinator.tick()
        cluster.settle()
    assert cluster.coordinator.waiting_for() == ("client",)
    assert cluster.of("stalled") == []


def test_single_steps_are_done_in_order_by_the_first_worker_alone():
    cluster = begun(job(workers=3, samples=20, epochs=2), until=1)
    stood = run(cluster)
    assert [(e, n) for e, n in stood] == [(e, n) for e in (0, 1) for n in range(1, 6)]
    assert [name for name, _ in cluster.pushes] == [A] * 10
    assert [task.start for _, task in cluster.pushes] == [0, 4, 8, 12, 16] * 2


def test_more_steps_at_a_time_are_shared_and_none_is_begun_beyond_them():
    cluster = begun(job(workers=2, samples=40), until=6)
    turns(cluster)
    assert len(cluster.pushes) == 6
    assert {name for name, _ in cluster.pushes} == {A, B}
    assert pauses(cluster) == [(6, True)]


def test_synchronous_training_stands_still_after_whole_rounds():
    cluster = begun(job("bsp", workers=2, samples=20), until=1)
    turns(cluster)
    assert sorted(name for name, _ in cluster.pushes) == [A, B]
    assert pauses(cluster) == [(1, True)]
    assert run(cluster) == [(0, n) for n in (1, 2, 3)]


def test_the_end_of_an_epoch_waits_for_the_client_as_well():
    cluster = begun(job(workers=1, samples=20), until=100)
    turns(cluster)
    assert pauses(cluster) == [(5, False)]
    assert cluster.of("epoch_end") == []
    cluster.coordinator.proceed(0, 200)
    turns(cluster)
    assert len(cluster.of("epoch_end")) == 1


def test_a_permission_of_no_more_steps_changes_nothing():
    cluster = begun(job(workers=1), until=2)
    turns(cluster)
    cluster.coordinator.proceed(0, 2)
    turns(cluster)
    assert pauses(cluster) == [(2, True)]
    assert len(cluster.pushes) == 2


def test_no_more_steps_named_lets_the_rest_run():
    cluster = begun(job(workers=2, epochs=2), until=1)
    turns(cluster)
    cluster.coordinator.proceed(0)
    cluster.coordinator.proceed(1)
    cluster.run()
    assert len(cluster.of("epoch_end")) == 2
    assert pauses(cluster) == [(1, True)]


@pytest.mark.parametrize("preset", ["asgd", "bsp"])
def test_stopping_where_it_stands_still_trains_nothing_more(preset):
    cluster = begun(job(preset, workers=2, samples=80, epochs=3), until=1)
    turns(cluster)
    cluster.coordinator.proceed(0, 2)
    turns(cluster)
    cluster.coordinator.stop_training()
    turns(cluster)
    assert [e["steps"] for e in cluster.of("epoch_end")] == [2]
    assert TrainingDone() in cluster.effects


def test_stopping_while_the_states_come_in_does_not_wait_for_the_client():
    cluster = begun(job(workers=1, samples=80), until=1)
    while not isinstance(cluster.workers[A].instruction, CollectState):
        cluster.turn(A)
    cluster.coordinator.stop_training()
    turns(cluster)
    assert [e["steps"] for e in cluster.of("epoch_end")] == [1]


def test_another_worker_goes_on_when_the_first_is_lost():
    cluster = begun(job(workers=2, samples=20), until=1)
    turns(cluster)
    cluster.kill(A)
    cluster.coordinator.proceed(0, 2)
    turns(cluster)
    assert [name for name, _ in cluster.pushes] == [A, B]
    assert pauses(cluster) == [(1, True), (2, True)]


def test_a_step_that_is_lost_is_done_again_before_it_stands_still():
    cluster = begun(job(workers=2, samples=20), until=1)
    while not isinstance(cluster.workers[A].instruction, Work):
        turns(cluster, 1)
    cluster.kill(A)
    turns(cluster)
    assert [(name, task.start) for name, task in cluster.pushes] == [(B, 0)]
    assert pauses(cluster) == [(1, True)]


def test_a_stream_stands_still_once_it_is_known_whether_it_goes_on():
    cluster = begun(job(workers=1, stream=True), until=1, batches=[b"one", b"two"])
    cluster.feed()
    turns(cluster)
    assert pauses(cluster) == []
    cluster.feed()
    turns(cluster)
    assert pauses(cluster) == [(1, True)]
    cluster.coordinator.proceed(0, 2)
    turns(cluster)
    assert pauses(cluster) == [(1, True)]
    cluster.feed()
    turns(cluster)
    assert pauses(cluster) == [(1, True), (2, False)]


def test_a_stream_is_fed_while_the_states_come_in():
    cluster = begun(job(workers=1, stream=True), until=1, batches=[b"one", b"two", b"three"])
    cluster.feed()
    cluster.feed()
    while not isinstance(cluster.workers[A].instruction, CollectState):
        cluster.turn(A)
    cluster.feed()
    run(cluster)
    assert sorted(cluster.trained[0]) == [b"one", b"three", b"two"]


@pytest.mark.parametrize("by", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("preset", ["asgd", "ssp", "bsp", "n-softsync", "h-ps", "ddc-asgd"])
def test_every_sample_is_trained_once(preset, stream, by):
    batches = [bytes([i]) for i in range(10)] if stream else None
    cluster = begun(job(preset, workers=3, samples=38, epochs=2, stream=stream), until=by, batches=batches)
    run(cluster, by)
    for epoch in (0, 1):
        assert set(cluster.trained[epoch].values()) == {1}
        assert len(cluster.trained[epoch]) == (10 if stream else 38)


@pytest.mark.parametrize("tasks", ["static", "proportional", "finish-together"])
def test_no_share_of_an_epoch_keeps_a_step_back(tasks):
    cluster = begun(job(workers=3, samples=40, epochs=2, overrides={"tasks": tasks}), until=1)
    assert len(run(cluster)) == 20


def counted(cluster):
    return float(load_arrays(cluster.merger.metrics)["sum/0"])


def test_state_and_metrics_are_those_of_the_moment():
    cluster = begun(job(workers=2, samples=20), until=3)
    assert cluster.merger.metrics == b""
    turns(cluster)
    steps = [sum(name == w for name, _ in cluster.pushes) for w in (A, B)]
    assert counted(cluster) == 12.0
    assert cluster.merger.current[0] == pytest.approx([steps[1] / 3])
    assert cluster.merger.encoded == b""


def test_the_metrics_of_an_epoch_are_kept_until_the_next_one_begins():
    cluster = begun(job(workers=2, samples=20, epochs=2), until=None)
    turns(cluster, 60)
    assert cluster.coordinator.phase == "hold"
    assert counted(cluster) == 20.0
    cluster.coordinator.proceed(1)
    assert cluster.merger.metrics == b""


def test_the_metrics_after_validation_are_those_of_the_validation():
    cluster = begun(job(workers=2, samples=20, validation=7), until=None)
    turns(cluster, 60)
    assert counted(cluster) == 7.0


def test_state_that_was_replaced_goes_to_the_workers_with_their_next_work():
    cluster = begun(job(workers=1, samples=20), until=1)
    turns(cluster)
    cluster.merger.replace([np.array([42.0])])
    cluster.coordinator.replaced()
    cluster.coordinator.proceed(0, 2)
    instruction = cluster.workers[A].ask()
    assert decode_arrays(instruction.untrained)[0] == [42.0]
    assert cluster.workers[A].ask().untrained == instruction.untrained, "repeated until it has begun"
    turns(cluster)
    cluster.coordinator.proceed(0, 3)
    assert cluster.workers[A].ask().untrained == b""


def test_a_worker_without_the_replaced_state_does_not_change_it():
    cluster = begun(job(workers=2, samples=40), until=4)
    turns(cluster)
    assert {name for name, _ in cluster.pushes} == {A, B}
    cluster.merger.replace([np.array([42.0])])
    cluster.coordinator.replaced()
    cluster.coordinator.proceed(0, 5)
    turns(cluster, names=[A])
    cluster.turn(B)
    turns(cluster)
    assert pauses(cluster)[-1] == (5, True)
    assert cluster.merger.current[0] == [0.0], "of the first worker alone, whose state is its number"


def test_a_worker_that_joins_meanwhile_begins_the_epoch_and_waits():
    cluster = begun(job(workers=1, samples=20), until=1)
    turns(cluster)
    cluster.join()
    assert isinstance(cluster.workers[B].ask(), BeginEpoch)
    cluster.workers[B].do()
    assert isinstance(cluster.workers[B].ask(), Wait)


def test_a_client_that_is_gone_stops_nothing():
    control = ClientControl(interactive=True, unwatched_since=0.0)
    control.permit(2, 7)
    assert control.permits(2)
    assert (control.steps_of(2), control.steps_of(1)) == (7, None)
    control.permit(1, 3)
    assert control.steps_of(2) == 7
    control.interactive = False
    assert control.steps_of(2) is None
