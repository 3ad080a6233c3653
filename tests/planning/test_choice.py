"""Planner: predictions compared with a schedule simulated event by event, and the choices that users expect."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.planning.cost_model import Cluster, PlannedPreset, WorkerCost, choose, flat_presets, predict
from nfdt.schedulers.ring_network import RingLink, RingNetwork
from nfdt.schedulers.throughput import StepTime


def cluster(step_ms, exchange_ms=0.0, **more) -> Cluster:
    workers = tuple(
        WorkerCost(f"w{i}", StepTime(0.0, ms / 1000 / 32), exchange_ms / 1000) for i, ms in enumerate(step_ms)
    )
    return Cluster(workers, local_batch=32, **more)


PUSHES = 20_000
DYNAMIC = flat_presets("dbs", 1)
TWO_OF_EIGHT = PlannedPreset("free", "dbs", groups=(tuple(range(8)), tuple(range(8, 16))))
speeds = st.lists(st.floats(1.0, 50.0), min_size=1, max_size=8)


def played_out(periods: list[float], overlap: int = 0) -> tuple[float, float]:
    """Return (pushes per second, mean staleness) of workers that push as soon as a step is done.

    With ``overlap`` the answer to the last push has not arrived when the next gradient begins.
    """
    version, now, staleness = 0, 0.0, 0
    queue = [(period, i, (0,) * (1 + overlap)) for i, period in enumerate(periods)]
    heapq.heapify(queue)
    for _ in range(PUSHES):
        now, worker, answers = heapq.heappop(queue)
        staleness += version - answers[0]
        version += 1
        heapq.heappush(queue, (now + periods[worker], worker, (*answers[1:], version)))
    return PUSHES / now, staleness / PUSHES


@given(speeds, st.integers(0, 1))
def test_free_workers_reach_the_sum_of_their_speeds_at_the_predicted_staleness(step_ms, overlap):
    prediction = predict(PlannedPreset("free", "fixed", overlap), cluster(step_ms))
    periods = [ms / 1000 for ms in step_ms]
    rate, staleness = played_out(periods, overlap)
    assert prediction.samples_per_s == pytest.approx(32 * rate, rel=0.01)
    begun_or_unfinished = 2 * (1 + overlap) * sum(period * rate for period in periods) / PUSHES
    assert prediction.staleness == pytest.approx(staleness, abs=0.01 + begun_or_unfinished)


@given(speeds, st.floats(0.0, 20.0))
def test_dynamic_batches_never_slow_a_barrier_down(step_ms, fixed_ms):
    workers = tuple(WorkerCost(f"w{i}", StepTime(fixed_ms / 1000, ms / 1000 / 32)) for i, ms in enumerate(step_ms))
    machines = Cluster(workers, 32)
    fixed, dynamic = (predict(PlannedPreset("bsp", batch), machines) for batch in ("fixed", "dbs"))
    assert dynamic.samples_per_s >= fixed.samples_per_s * (1 - 1e-9)


def test_a_barrier_runs_at_the_speed_of_the_slowest():
    assert predict(PlannedPreset("bsp", "fixed"), cluster([10, 10, 40, 40])).samples_per_s == pytest.approx(
        4 * 32 / 0.040
    )


def test_a_shard_that_is_full_limits_the_rate():
    machines = cluster([10] * 8, shard_step_s=0.005)
    assert predict(PlannedPreset("free", "fixed"), machines).samples_per_s == pytest.approx(32 / 0.005)


def test_the_fastest_and_the_slowest_worker_differ_in_staleness_unless_batches_follow_speed():
    machines = cluster([10, 10, 40, 40])
    fixed, dynamic = (predict(PlannedPreset("free", batch), machines) for batch in ("fixed", "dbs"))
    assert fixed.staleness == dynamic.staleness == 3
    assert fixed.most_staleness == pytest.approx(9)
    assert dynamic.most_staleness == pytest.approx(3)


def test_overlap_hides_the_exchange_and_adds_a_step_of_each_worker_to_the_staleness():
    machines = cluster([10, 10], exchange_ms=8)
    plain, overlapped = (predict(PlannedPreset("free", "fixed", overlap), machines) for overlap in (0, 1))
    assert overlapped.samples_per_s == pytest.approx(plain.samples_per_s * 1.8)
    assert overlapped.staleness == plain.staleness + 2


@pytest.mark.parametrize(
    ("described", "more", "expected"),
    [
        (cluster([10, 10, 10, 10]), [], PlannedPreset("free", "dbs")),
        (cluster([10, 10, 40, 40], exchange_ms=0.5), [], PlannedPreset("free", "dbs")),
        (cluster([10, 10, 40, 40], exchange_ms=20), [], PlannedPreset("free", "dbs", 1)),
        (  # the shard is full: groups push less often
            cluster([10] * 8 + [40] * 8, shard_step_s=0.01, allreduce_s=0.001),
            [TWO_OF_EIGHT],
            TWO_OF_EIGHT,
        ),
    ],
)
def test_the_choice_fits_the_machines(described, more, expected):
    assert choose(described, [*DYNAMIC, *more]).preset == expected


def test_overlap_is_bounded_by_what_the_job_allows():
    assert choose(cluster([10, 10], exchange_ms=20), flat_presets("dbs", 0)).preset.overlap == 0


def test_one_worker_trains_like_one_machine():
    choice = choose(cluster([10]), DYNAMIC)
    assert choice.preset == PlannedPreset("free", "dbs")
    assert choice.prediction.samples_factor == 1


@given(speeds, st.floats(0.0, 60.0), st.floats(0.0, 0.02))
def test_the_choice_is_the_best_candidate_and_a_running_row_is_kept_unless_clearly_worse(step_ms, exchange, shard_s):
    machines = cluster(step_ms, exchange, shard_step_s=shard_s)
    rows = DYNAMIC
    best = choose(machines, rows)
    assert best.prediction.progress_per_s == max(predict(row, machines).progress_per_s for row in rows)
    for current in rows:
        kept = choose(machines, rows, current=current)
        if kept.preset != current:
            assert kept.prediction.progress_per_s >= 1.1 * predict(current, machines).progress_per_s


def test_the_reason_names_what_was_measured_and_what_is_expected():
    reason = choose(cluster([10, 10, 40, 40], exchange_ms=0.5), DYNAMIC).reason
    assert reason == (
        "free workers with dynamic batches, overlap 0: 4 workers take 10 to 40 ms per batch of 32 and 0.5 ms to "
        "exchange; expected 7,758 samples/s, 2.5 times a barrier's, at a mean staleness of 3.0."
    )


def test_a_group_on_one_machine_of_several_exchanges_there():
    network = RingNetwork(("a", "a", "b", "b"), 1_000_000, local=RingLink(0.0, 1e-9))
    machines = cluster([10] * 4, allreduce_s=0.5, network=network)
    assert machines.ring_s((0, 1)) == pytest.approx(0.001)
    assert machines.ring_s((1, 2)) == 0.5
    assert machines.ring_s((3,)) == 0.0
    one = cluster([10] * 4, allreduce_s=0.5, network=RingNetwork(("a",) * 4, 1_000_000))
    assert one.ring_s((0, 1)) == 0.5
    near, far = (
        predict(PlannedPreset("free", "dbs", groups=g), machines) for g in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    assert near.samples_per_s > 10 * far.samples_per_s
