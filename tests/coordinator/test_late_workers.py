"""Workers that are late, by their measured steps, or silent: others do not wait for them."""

import pytest

from nfdt.consistency import make_policy
from nfdt.coordinator.decisions import Decisions
from nfdt.coordinator.epoch_metrics import EpochMetrics
from nfdt.coordinator.membership import Member, Membership
from nfdt.core.work.instructions import BeginEpoch, CollectState, Evaluate, Report, Summarise, TaskTime, Wait, Work
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import PlannedTasks
from nfdt.schedulers.tasks import TaskPlan
from tests.support.simulated_cluster import SimulatedCluster, job, started

A, B = "worker-0", "worker-1"


def decisions_of(samples, **overrides):
    spec = job(workers=2, samples=samples, batch_size=1, overrides=overrides)
    return Decisions(spec, make_policy(spec.algorithm))


def test_a_step_takes_its_exchange_too():
    parts = decisions_of(10)
    for _ in range(10):
        parts.speeds.stepped(A, 1, TaskTime(0.1, 0.3))
    described = parts.speeds.describe([A])[A]
    assert described["step_s"] == pytest.approx(0.4)
    assert described["step_exchange_s"] == pytest.approx(0.3)


@pytest.mark.parametrize(("late_s", "gets"), [(0.0, 0), (20.0, 1)])
def test_a_late_worker_may_be_late_for_as_long_again(late_s, gets):
    parts = decisions_of(2, tasks="finish-together")
    members = Membership(2, 0.0)
    slow, quick = members.join(A, 0, 0.0), members.join(B, 1, 0.0)
    for member in (slow, quick):
        members.set_ready(member)
    for _ in range(10):
        parts.speeds.stepped(A, 1, TaskTime(10.0))
        parts.speeds.stepped(B, 1, TaskTime(1.0))
    book = LeaseBook(PlannedTasks(TaskPlan(2, 1)))
    book.issue(B)
    quick.leased_at, now = 0.0, 1.0 + late_s
    slow.leased_at = now
    quick.seen_at = slow.seen_at = now
    assert parts.leases.size(slow, members.ready(), book, now) == gets


def two_workers(samples=8, **options) -> SimulatedCluster:
    """Return a job whose two workers have begun the epoch; batches have 4 samples."""
    cluster = started(job(samples=samples, **options))
    assert isinstance(cluster.workers[A].ask(), Wait)
    for name in (B, A):
        assert isinstance(cluster.workers[name].ask(), BeginEpoch)
    for name in (A, B):
        finish(cluster, name)
        cluster.coordinator.heard(name, 0.0)
    return cluster


def pass_time(cluster, seconds, *silent):
    """Let time pass; all workers but the silent ones give signs of life."""
    cluster.clock.advance(seconds)
    for name in cluster.workers:
        if name not in silent:
            cluster.coordinator.heard(name, 0.0)
    cluster.coordinator.tick()
    cluster.settle()


def finish(cluster, name):
    """Execute the worker's instruction, and ask for the next one."""
    cluster.workers[name].do()
    instruction = cluster.workers[name].ask()
    cluster.settle()
    return instruction


def hold_the_last_task(cluster):
    """Let the first of two workers, whose speed is known, hold the last task, and the other one nothing."""
    while cluster.coordinator.waiting_tasks:
        assert isinstance(finish(cluster, A), Work)
    assert finish(cluster, B) == Wait()


def test_the_tail_of_a_silent_worker_is_trained_by_one_that_has_nothing_left():
    cluster = two_workers(epochs=2, interactive=False)
    silent = cluster.workers[A].instruction.tasks
    assert finish(cluster, B) == Wait()
    pass_time(cluster, 2.6, A)
    again = cluster.workers[B].ask()
    assert again.tasks == silent
    assert isinstance(finish(cluster, B), CollectState)
    finish(cluster, B)
    pass_time(cluster, 0.5, A)
    cluster.flush()
    assert isinstance(cluster.workers[B].ask(), Summarise)
    assert isinstance(finish(cluster, B), BeginEpoch), "the next epoch begins without the silent one"
    (end,) = cluster.of("epoch_end")
    assert (end["samples"], end["logs"]["seen"]) == (8, 8.0)
    assert [log["level"] for log in cluster.of("log") if A in log["text"]] == ["warning"]


def test_what_a_silent_worker_pushed_late_does_not_count_and_it_takes_part_again():
    cluster = two_workers(epochs=2, interactive=False)
    finish(cluster, B)
    pass_time(cluster, 2.6, A)
    cluster.workers[B].ask()
    finish(cluster, B)
    finish(cluster, B)
    pass_time(cluster, 0.5, A)
    cluster.flush()
    cluster.workers[B].ask()
    finish(cluster, B)
    assert isinstance(finish(cluster, A), BeginEpoch)
    cluster.run()
    assert [end["samples"] for end in cluster.of("epoch_end")] == [8, 8]
    assert sum(row["samples"] for row in cluster.coordinator.measured().values()) == 16
    assert cluster.all_left()


def test_a_worker_is_late_when_its_lease_takes_over_twice_its_time_and_a_second_more():
    cluster = two_workers(80)
    hold_the_last_task(cluster)
    pass_time(cluster, 0.9)
    assert cluster.workers[B].ask() == Wait()
    pass_time(cluster, 0.2)
    assert cluster.workers[B].ask().tasks == cluster.workers[A].instruction.tasks


def test_an_overtaken_worker_that_lives_has_a_second_to_hand_in_its_state():
    cluster = two_workers(80)
    hold_the_last_task(cluster)
    pass_time(cluster, 1.2)
    cluster.workers[B].ask()
    assert isinstance(finish(cluster, B), CollectState)
    finish(cluster, B)
    pass_time(cluster, 0.5)
    pass_time(cluster, 0.9)
    assert cluster.coordinator.waiting_for() == (A,)
    pass_time(cluster, 0.2)
    cluster.flush()
    assert cluster.coordinator.phase == "summarise"


def test_nobody_s_state_is_given_up_before_there_is_another_one():
    cluster = two_workers(4)
    finish(cluster, A)
    pass_time(cluster, 5.0, A, B)
    assert cluster.coordinator.phase == "collect"
    assert cluster.coordinator.waiting_for() == (A, B)


def test_rows_that_a_silent_worker_evaluates_are_evaluated_by_another_and_count_once():
    cluster = two_workers(validation=8)
    for name in (A, B):
        finish(cluster, name)
    for name in (A, B):
        cluster.workers[name].ask()
        finish(cluster, name)
    cluster.flush()
    assert isinstance(cluster.workers[A].ask(), Evaluate)
    assert isinstance(cluster.workers[B].ask(), Evaluate)
    assert finish(cluster, B) == Wait()
    pass_time(cluster, 3.0, A)
    assert cluster.workers[B].ask().tasks == cluster.workers[A].instruction.tasks
    assert isinstance(finish(cluster, B), Summarise)
    finish(cluster, A)
    finish(cluster, B)
    assert cluster.of("epoch_end")[0]["val_logs"] == {"rows": 8.0}


def test_another_worker_summarises_in_place_of_a_silent_one():
    cluster = two_workers(4)
    finish(cluster, A)
    for name in (A, B):
        cluster.workers[name].ask()
        finish(cluster, name)
    cluster.flush()
    assert isinstance(cluster.workers[A].ask(), Summarise)
    assert cluster.workers[B].ask() == Wait()
    pass_time(cluster, 3.0, A)
    assert isinstance(cluster.workers[B].ask(), Summarise)


def test_a_call_that_waits_gets_no_work_once_its_worker_is_suspected():
    cluster = two_workers(4, epochs=2, interactive=False)
    assert cluster.coordinator.next(B) == Wait()
    pass_time(cluster, 3.0, B)
    finish(cluster, A)
    assert cluster.coordinator.next(B) == Wait(), "it does not end the epoch"
    assert isinstance(cluster.workers[B].ask(), CollectState)


def test_workers_whose_processes_give_no_signs_of_life_are_not_suspected():
    cluster = two_workers()
    for member in (A, B):
        cluster.coordinator._members.get(member).heard_at = None
    finish(cluster, B)
    cluster.clock.advance(30.0)
    cluster.coordinator.tick()
    assert cluster.workers[B].ask() == Wait()


@pytest.mark.parametrize("preset", ["ssp", "bsp"])
def test_presets_that_wait_for_slow_workers_still_do(preset):
    cluster = two_workers(preset=preset)
    finish(cluster, B)
    pass_time(cluster, 3.0, A)
    assert cluster.workers[B].ask() == Wait()


def test_a_share_that_a_silent_worker_has_not_begun_is_trained_by_others():
    cluster = two_workers(32, overrides={"tasks": "static"})
    own = [finish(cluster, B) for _ in range(4)]
    assert own[-1] == Wait()
    pass_time(cluster, 3.0, A)
    cluster.workers[B].ask()
    others = [finish(cluster, B) for _ in range(4)]
    assert isinstance(others[-1], CollectState)
    assert cluster.coordinator.run.training.book.samples_finished == 32


def end_of(cluster, *silent):
    """Let the job end, without the silent workers; return the data of its last epoch."""
    for name in silent:
        cluster.workers.pop(name)
    for _ in range(400):
        if cluster.of("epoch_end"):
            break
        for name in list(cluster.workers):
            cluster.turn(name)
        cluster.flush()
        pass_time(cluster, 0.1, *silent)
    return cluster.of("epoch_end")[-1]


def test_the_metrics_have_the_finished_tasks_of_a_worker_whose_state_is_missing():
    cluster = two_workers(80, epochs=2, interactive=False)
    hold_the_last_task(cluster)
    pass_time(cluster, 2.6, A)
    end = end_of(cluster, A)
    assert end["samples"] == end["logs"]["seen"] == 80


@pytest.mark.parametrize("reports", ["before", "with its state", "never"])
def test_a_task_that_two_workers_have_computed_counts_once(reports):
    cluster = two_workers(80, epochs=2, interactive=False)
    hold_the_last_task(cluster)
    pass_time(cluster, 1.2)
    cluster.workers[B].ask()
    cluster.workers[A].do()
    if reports == "before":
        cluster.workers[A].ask()
    cluster.workers[B].do()
    cluster.workers[B].ask()
    end = end_of(cluster, *([A] if reports == "never" else []))
    assert end["samples"] == end["logs"]["seen"] == 80


def test_a_lost_worker_s_finished_tasks_stay_in_the_metrics():
    cluster = two_workers(80, epochs=2, interactive=False)
    finish(cluster, A)
    cluster.kill(A)
    end = end_of(cluster)
    assert end["samples"] == end["logs"]["seen"] == 80


def test_metrics_of_a_lost_worker_that_count_a_task_which_is_trained_again_are_dropped():
    metrics, report = EpochMetrics(), Report(finished=(1,), metrics=b"first", counted=frozenset({2}))
    metrics.reported(Member("a", 0, 0.0), report, ())
    metrics.reported(Member("b", 1, 0.0), Report(finished=(3,), metrics=b"second"), ())
    metrics.repeated("a", [3])
    metrics.repeated("b", [2])
    metrics.repeated("a", [2])
    assert metrics.merged() == b"second"
