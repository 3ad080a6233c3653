"""Exact decisions of the coordinator by speed: workers' steps take scripted times on a virtual clock."""

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.instructions import Emit, Report, TaskTime, Work
from nfdt.core.work.messages import to_report
from nfdt.schedulers import task_policies
from tests.support.simulated_cluster import job, started
from tests.support.timed_cluster import TimedCluster

BATCH = 16


def timed(preset, seconds, *, samples=1600, step_s=None, **options):
    """Return a cluster that has run, with one worker for each of ``seconds`` per full batch."""
    spec = job(preset, workers=len(seconds), samples=samples, batch_size=BATCH, **{"epochs": 2, **options})
    cluster = TimedCluster(spec, step_s or (lambda index, samples, now: seconds[index] * samples / BATCH))
    return cluster.run()


def all_rows_once(cluster):
    spec = cluster.spec
    rows = [cluster.trained[epoch] for epoch in range(spec.fit.epochs)]
    assert all(set(each.values()) == {1} and len(each) == spec.train.samples for each in rows)


SECONDS = st.lists(st.sampled_from([0.01, 0.02, 0.07, 0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=6)


@given(seconds=SECONDS, steps=st.integers(8, 120))
@settings(max_examples=4 * settings().max_examples // 5)
def test_workers_finish_within_one_of_their_steps_of_the_end(seconds, steps):
    cluster = timed("asgd", seconds, samples=steps * BATCH, epochs=3, overrides={"tasks": "finish-together"})
    all_rows_once(cluster)
    known = {name for name, *_ in cluster.steps if sum(step[0] == name for step in cluster.steps) >= 7}
    if len(known) < len(seconds):  # one worker has done too few steps for its speed to be known
        return
    end = max(cluster.ends[2].values())
    began = max(cluster.ends[1].values())
    for index, step_s in enumerate(seconds):
        assert end - cluster.ends[2].get(f"worker-{index}", began) <= step_s + 1e-6


def test_finishing_together_ends_sooner_than_leases_alone():
    def last_epoch(tasks):
        cluster = timed("asgd", [0.05, 0.05, 1.0], samples=50 * BATCH, overrides={"tasks": tasks}, epochs=12)
        return max(cluster.ends[11].values()) - max(cluster.ends[10].values())

    ideal = 50 / (20 + 20 + 1)
    assert last_epoch("finish-together") <= ideal + 0.05 + 1e-6
    assert last_epoch("dynamic") > ideal + 0.3


@given(seconds=SECONDS, steps=st.integers(8, 120))
@settings(max_examples=2 * settings().max_examples // 5)
def test_the_others_are_looked_at_only_where_it_changes_something(seconds, steps):
    def run():
        cluster = timed("asgd", seconds, samples=steps * BATCH, epochs=2, overrides={"tasks": "finish-together"})
        return cluster.steps

    found = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_policies.FinishTogetherTasks, "_ends_soon", lambda *_: True)
        assert run() == found


def test_most_leases_of_a_long_epoch_look_at_no_other_worker(monkeypatch):
    looks, look = [], task_policies.steps_to_share
    monkeypatch.setattr(task_policies, "steps_to_share", lambda *args: looks.append(1) or look(*args))
    cluster = timed("asgd", [0.1] * 40, samples=4000 * BATCH, epochs=1, overrides={"tasks": "finish-together"})
    assert len(looks) < len(cluster.steps) / 4


def test_work_that_a_worker_has_not_begun_is_taken_back():
    """Case: worker-0 becomes 50 times slower while it holds several tasks near the end of the epoch."""
    change_at = 5.0
    quick, slow = 0.01, 0.5

    def step_s(index, samples, now):
        return slow if index == 0 and now >= change_at else quick

    # 4 workers of 100 steps/s do 2,000 steps in 5 s: the change hits the end of the only epoch.
    cluster = timed(
        "asgd", [quick] * 4, samples=2080 * BATCH, epochs=1, step_s=step_s, overrides={"tasks": "finish-together"}
    )
    all_rows_once(cluster)
    late = [began for name, began, *_ in cluster.steps if name == "worker-0" and began >= change_at]
    assert 1 <= len(late) <= 2  # only tasks that it had begun
    assert max(cluster.ends[0].values()) <= change_at + 0.2 + 2 * slow


def test_a_fast_worker_that_falls_silent_is_not_waited_for():
    cluster = TimedCluster(
        job("asgd", workers=2, samples=100 * BATCH, batch_size=BATCH, overrides={"tasks": "finish-together"}),
        lambda index, samples, now: (0.01, 0.8)[index],
    )
    instructions = []
    coordinator, slow = cluster.coordinator, cluster.workers["worker-1"]
    speeds = coordinator._decisions.speeds
    for name, seconds in (("worker-0", 0.01), ("worker-1", 0.8)):
        for _ in range(8):
            speeds.stepped(name, BATCH, TaskTime(seconds))
    while cluster._all_ask():
        pass
    for name in ("worker-1", "worker-0"):  # worker-0 reports, and then stays silent
        cluster.clock.advance(max(0.0, cluster.busy[name][0] - cluster.clock.now()))
        cluster._report(name)
    coordinator.next("worker-0", cluster.workers.pop("worker-0").report)
    coordinator.run.training.book.give_back("worker-0")
    for _ in range(120):
        instructions.append(type(slow.ask()))
        if instructions[-1] is Work:
            break
        cluster.clock.advance(1.0)
    assert Work in instructions


def test_a_worker_that_got_nothing_for_long_may_show_that_it_is_quick_again():
    """Case: until 4 s, a step of worker-1 takes longer than an epoch of the other worker."""
    cluster = timed(
        "asgd",
        [0.01, 0.5],
        samples=40 * BATCH,
        epochs=60,
        step_s=lambda index, samples, now: 0.5 if index and now < 4 else 0.01,
        overrides={"tasks": "finish-together"},
    )
    slow = [began for name, began, *_ in cluster.steps if name == "worker-1"]
    assert sum(began > 14 for began in slow) > 100
    assert not [began for began in slow if 4 < began < 8]


@pytest.mark.parametrize(("compute_s", "exchange_s"), [(float("nan"), 0.1), (float("inf"), 0), (-1, 2), (0, 0)])
def test_times_that_cannot_be_are_not_believed(compute_s, exchange_s):
    done = pb.Finished(task=3, samples=16, compute_s=compute_s, exchange_s=exchange_s)
    report = to_report(pb.NextRequest(worker="w", finished=[done]))
    assert report.finished == (3,)
    assert report.times == {}


def test_unreported_tasks_go_to_the_worker_that_asks_next():
    cluster = started(job(workers=2, samples=4000, batch_size=1))
    worker, other = cluster.workers["worker-0"], cluster.workers["worker-1"]
    work, _ = None, other.ask()
    for _ in range(40):
        cluster.turn("worker-0")
        if isinstance(worker.instruction, Work) and len(worker.instruction.tasks) >= 3:
            work = worker.instruction
            break
        cluster.clock.advance(0.001)
    assert work is not None
    task = work.tasks[0].task
    worker.instruction, worker.report = None, Report((task,), 0, times={task: TaskTime(5.0)})
    cluster.coordinator.next("worker-1")
    assert other.ask().tasks[0] not in work.tasks  # still worker-0's
    worker.ask()
    assert other.ask() is not None
    cluster.run()
    assert set(cluster.trained[0].values()) == {1}
    assert len(cluster.trained[0]) == 4000 - 1  # the row that this test reported itself


def test_proportional_shares_are_the_speeds_within_a_step():
    seconds = [0.1, 0.1, 0.4, 0.4]
    cluster = timed("asgd", seconds, samples=500 * BATCH, overrides={"tasks": "proportional"})
    all_rows_once(cluster)
    counts = [
        sum(s[0] == f"worker-{i}" and s[1] >= max(cluster.ends[0].values()) for s in cluster.steps) for i in range(4)
    ]
    assert counts == [200, 200, 50, 50]


@pytest.mark.parametrize(("preset", "overrides"), [("bsp", {}), ("asgd", {}), ("ssp", {}), ("n-softsync", {})])
def test_dynamic_batches_even_step_times_out_under_a_constant_total(preset, overrides):
    cluster = timed(preset, [0.1, 0.1, 0.4, 0.4], samples=4000, overrides={"batch": "dbs", **overrides})
    all_rows_once(cluster)
    second = [s for s in cluster.steps if s[1] > max(cluster.ends[0].values())]
    times = [mean(s[3] for s in second if s[0] == f"worker-{i}") for i in range(4)]
    assert max(times) < 1.15 * min(times)
    assert {w: row["batch_size"] for w, row in cluster.coordinator.measured().items()} == {
        "worker-0": 26,
        "worker-1": 26,
        "worker-2": 6,
        "worker-3": 6,
    }


def test_a_change_of_speed_moves_batches_within_a_few_steps():
    """Case: worker-0 is four times slower from 20 s on."""

    def step_s(index, samples, now):
        return 0.1 * samples / BATCH * (4 if index == 0 and now >= 20 else 1)

    cluster = timed("asgd", [0.1] * 4, samples=32_000, epochs=1, step_s=step_s, overrides={"batch": "dbs"})
    all_rows_once(cluster)
    after = [s for s in cluster.steps if s[0] == "worker-0" and s[1] >= 20]
    assert [s[2] for s in after[:2]] == [BATCH, BATCH]
    assert all(s[2] <= 6 for s in after[10:-1])


def test_rounds_hold_the_same_rows_whatever_the_sizes():
    cluster = timed("bsp", [0.1, 0.2, 0.7], samples=1000, overrides={"batch": "dbs"})
    rounds = {}
    for _, task in cluster.pushes:
        rounds.setdefault((task.pass_index, task.round), []).append(task.samples)
    assert [sum(parts) for parts in rounds.values()] == ([48] * 20 + [40]) * 2
    assert [end["steps"] for end in cluster.of("epoch_end")] == [21, 21]


def test_the_bounds_of_a_batch_hold_in_every_task():
    overrides = {"batch": "dbs", "batch_min": 8, "batch_max": 20, "batch_multiple": 4}
    cluster = timed("bsp", [0.1, 0.1, 0.9], samples=48 * 30, overrides=overrides)
    sizes = {task.samples for _, task in cluster.pushes}
    assert sizes <= {8, 12, 16, 20}
    assert {8, 20} <= sizes


def test_speeds_are_reported_about_once_a_second_when_they_change():
    cluster = timed("asgd", [0.05, 0.2], samples=8000)
    events = cluster.of("speed")
    assert 1 <= len(events) <= 3
    assert events[-1]["workers"] == {
        "worker-0": {
            "samples_per_s": pytest.approx(320),
            "step_s": pytest.approx(0.05),
            "step_exchange_s": 0,
            "batch_size": 16,
        },
        "worker-1": {
            "samples_per_s": pytest.approx(80),
            "step_s": pytest.approx(0.2),
            "step_exchange_s": 0,
            "batch_size": 16,
        },
    }


@pytest.mark.parametrize("option", [{"batch": "dbs"}, {"tasks": "finish-together"}, {"tasks": "proportional"}])
def test_a_stream_keeps_its_batches_and_logs_it(option):
    cluster = started(job(overrides=option, stream=True), [b"a", b"b", b"c"])
    cluster.run()
    assert set(cluster.trained[0]) == {b"a", b"b", b"c"}
    (log,) = [e.data for e in cluster.effects if isinstance(e, Emit) and e.kind == "log"]
    assert log["level"] == "warning"
    assert "keep the size" in log["text"] or "as they come" in log["text"]
