"""Online planner, which chooses a job's preset while it trains: its decisions, their times and their reasons."""

import pytest

from nfdt.coordinator.online_planner import OnlinePlanner, ShardLoad, follows_a_plan, plan_event
from nfdt.coordinator.topology_view import grouped, view_of
from nfdt.core.work.instructions import Emit
from nfdt.planning.cost_model import PlannedPreset
from nfdt.schedulers.group_shares import FixedSizes
from nfdt.schedulers.throughput import StepTime
from tests.support.simulated_cluster import job
from tests.support.timed_cluster import TimedCluster

BATCH = 32


def steps(compute_ms, exchange_ms, hidden=0.0):
    """Return step times as the coordinator measures them: seconds of a step with its exposed part, and that part."""
    shown = exchange_ms * (1 - hidden) / 1000
    return {f"worker-{i}": (StepTime(0.0, (ms / 1000 + shown) / BATCH), shown) for i, ms in enumerate(compute_ms)}


def auto(compute_ms, exchange_ms, preset="auto", **options):
    spec = job(preset, workers=len(compute_ms), samples=BATCH * 200, batch_size=BATCH, epochs=2, **options)
    cluster = TimedCluster(spec, lambda index, n, now: compute_ms[index] / 1000 * n / BATCH, exchange_ms / 1000)
    return cluster.run()


def plans(cluster):
    return [effect.data for effect in cluster.effects if isinstance(effect, Emit) and effect.kind == "plan"]


def test_an_exchange_worth_hiding_is_hidden_and_the_reason_holds_the_measurements():
    cluster = auto([10, 10, 40, 40], exchange_ms=20)
    (plan,) = plans(cluster)
    assert plan["row"] == {"topology": "flat", "batch": "dbs", "overlap": 1}
    assert "4 workers take 10 to 40 ms per batch of 32 and 20 ms to exchange" in plan["reason"]
    second_epoch_s = max(cluster.ends[1].values()) - max(cluster.ends[0].values())
    assert BATCH * 200 / second_epoch_s == pytest.approx(plan["samples_per_s"], rel=0.1)


def test_a_short_exchange_is_not_worth_the_staleness():
    (plan,) = plans(auto([10, 10, 40, 40], exchange_ms=0.2))
    assert plan["row"]["overlap"] == 0


def test_h_ps_hides_an_exchange_only_where_that_pays():
    for exchange_ms, overlap in ((20, 1), (0.2, 0)):
        (plan,) = plans(auto([10, 10, 40, 40], exchange_ms, preset="h-ps"))
        assert plan["row"] == {"topology": "flat", "batch": "fixed", "overlap": overlap}
    assert plans(auto([10, 10, 40, 40], exchange_ms=20, preset="h-ps", overrides={"plan": "nothing"})) == []


def test_what_the_user_rules_out_is_not_chosen():
    (plan,) = plans(auto([10, 10], exchange_ms=20, overrides={"overlap": 0}))
    assert plan["row"]["overlap"] == 0


def test_every_sample_is_trained_once_whatever_is_chosen():
    cluster = auto([10, 35, 40], exchange_ms=20)
    for epoch in range(2):
        assert set(cluster.trained[epoch].values()) == {1}
        assert len(cluster.trained[epoch]) == BATCH * 200


def test_a_decision_is_kept_while_what_it_hides_cannot_be_seen_and_changed_when_that_matters_no_more():
    planner = OnlinePlanner(BATCH, overlap=1)
    assert planner.look(steps([20, 20], 20)).preset.overlap == 1
    assert planner.look(steps([20, 20], 20, hidden=1.0)) is None
    assert planner.look(steps([21, 19], 20, hidden=0.9)) is None
    assert planner.look(steps([2000, 2000], 20, hidden=1.0)).preset.overlap == 0


@pytest.mark.parametrize("batch", ["dbs", "fixed"])
def test_before_anything_is_measured_workers_are_free_and_hide_nothing(batch):
    planner = OnlinePlanner(BATCH, overlap=2, batch=batch)
    assert planner.preset == PlannedPreset("free", batch, 0)
    assert planner.choice is None
    assert planner.look(steps([20, 20], 0.1)).preset == PlannedPreset("free", batch, 0)


def test_a_worker_that_comes_while_exchanges_are_hidden_is_taken_as_it_shows_itself():
    planner = OnlinePlanner(BATCH, overlap=1)
    assert planner.look(steps([20, 20], 20)).preset.overlap == 1
    assert planner.look(steps([20, 20, 20], 20, hidden=0.5)) is None


def test_a_decision_is_reported_with_its_prediction_and_reason():
    choice = OnlinePlanner(BATCH, overlap=1).look(steps([30, 30, 30], 0))
    assert plan_event(choice) == {
        "row": {"topology": "flat", "batch": "dbs", "overlap": 0},
        "samples_per_s": 3200.0,
        "reason": choice.reason,
    }


@pytest.mark.parametrize(
    ("preset", "options", "follows"),
    [
        ("auto", {}, True),
        ("h-ps", {}, True),
        ("auto", {"plan": "nothing"}, False),
        ("auto", {"consistency": "ssp"}, False),
        ("group-sync", {"plan": "topology"}, False),
    ],
)
def test_only_free_flat_workers_leave_a_choice(preset, options, follows):
    assert follows_a_plan(job(preset, workers=4, overrides=options)) == follows


FULL = ShardLoad(busy_s=0.01, wait_s=0.15)


def planned(*, load=FULL, remaining_s=100.0, workers=16):
    planner = OnlinePlanner(BATCH, overlap=1)
    measured = steps([10] * workers, 170)
    assert planner.look(measured).preset.topology == "flat"
    return planner.look_at_groups(measured, load, remaining_s)


def test_a_shard_that_is_full_is_relieved_by_groups():
    choice = planned()
    assert (choice.preset.consistency, choice.preset.batch, choice.preset.overlap) == ("free", "dbs", 0)
    assert sorted(member for group in choice.preset.groups for member in group) == list(range(16))
    assert choice.reason.startswith("groups 0,1,2")


@pytest.mark.parametrize(
    "other",
    [{"load": ShardLoad(0.0001, 0.0)}, {"remaining_s": 10.0}, {"workers": 1}],
    ids=["idle shard", "little left", "one worker"],
)
def test_workers_stay_flat_where_groups_do_not_pay(other):
    assert planned(**other) is None


def test_the_load_is_that_of_the_busiest_shard_and_nothing_before_the_first_push():
    counted = [{"pushes": 10, "busy_s": 0.1, "wait_s": 0.0}, {"pushes": 10, "busy_s": 0.4, "wait_s": 0.2}]
    assert ShardLoad.of(counted) == ShardLoad(0.04, 0.02)
    assert ShardLoad.of([{"pushes": 0, "busy_s": 0.0, "wait_s": 0.0}]) == ShardLoad(0.0, 0.0)


class TurningCluster(TimedCluster):
    """Cluster whose four flat workers are replaced by two groups of two at the end of the first epoch."""

    def proceed(self):
        if self.proceeds == [1] and len(self.workers) == 4:
            choice = self.coordinator.plan_groups(ShardLoad(0.03, 0.06), remaining_s=1000.0)
            self.groups = choice.preset.groups
            self.coordinator.retire_all()
            self.workers.clear()
            sizes = FixedSizes(BATCH)
            sizes.state({f"worker-{4 + i}": len(group) * BATCH for i, group in enumerate(self.groups)})
            self.coordinator.renew(
                view_of(grouped(self.spec)).effective_spec(grouped(self.spec), groups=len(self.groups)), sizes
            )
            self.settle()
            self.join(len(self.groups))
        super().proceed()


def test_a_job_goes_on_with_groups_and_trains_every_sample_once():
    spec = job("auto", workers=4, samples=BATCH * 200, batch_size=BATCH, epochs=3)
    cluster = TurningCluster(spec, lambda index, n, now: 0.01 * n / BATCH, 0.09).run()
    assert len(cluster.workers) == len(cluster.groups) < 4
    for epoch in range(3):
        assert set(cluster.trained[epoch].values()) == {1}
        assert len(cluster.trained[epoch]) == BATCH * 200
    later = {samples for worker, _, samples, _ in cluster.steps if worker not in {f"worker-{i}" for i in range(4)}}
    assert max(later) == max(len(group) for group in cluster.groups) * BATCH
    assert cluster.of("worker_lost") == []


@pytest.mark.parametrize("reverse", [False, True])
def test_groups_of_flat_workers_keep_to_their_machines_where_links_are_slow(reverse):
    planner = OnlinePlanner(BATCH, overlap=1)
    measured = steps([10] * 8, 170)
    planner.look(measured)
    machines = {name: "ab"[(int(name[-1]) % 2) != reverse] for name in measured}
    load = ShardLoad(0.01, 0.15, weights=250_000)
    groups = planner.look_at_groups(measured, load, 1000.0, machines).preset.groups
    assert sorted(member for group in groups for member in group) == list(range(8))
    assert max(map(len, groups)) > 1
    for group in groups:
        assert len({machines[f"worker-{member}"] for member in group}) == 1


def test_the_load_names_the_weights_of_all_shards():
    counted = [{"pushes": 10, "busy_s": 0.1, "wait_s": 0.0, "size": 70}, {"pushes": 0, "size": 30}]
    assert ShardLoad.of(counted) == ShardLoad(0.01, 0.0, weights=100)
