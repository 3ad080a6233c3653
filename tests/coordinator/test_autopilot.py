"""A job that chooses its row while it trains: what it decides, when, and what it says."""

import pytest

from nfdt.coordinator import Emit
from nfdt.coordinator.autopilot import Autopilot
from nfdt.schedulers import StepTime
from tests.simulated_cluster import job
from tests.timed_cluster import TimedCluster

BATCH = 32


def steps(compute_ms, exchange_ms, hidden=0.0):
    """What the coordinator knows of workers: seconds of a step with what is not hidden, and that part."""
    shown = exchange_ms * (1 - hidden) / 1000
    return {f"worker-{i}": (StepTime(0.0, (ms / 1000 + shown) / BATCH), shown) for i, ms in enumerate(compute_ms)}


def auto(compute_ms, exchange_ms, **options):
    spec = job("auto", workers=len(compute_ms), samples=BATCH * 200, batch_size=BATCH, epochs=2, **options)
    cluster = TimedCluster(spec, lambda index, n, now: compute_ms[index] / 1000 * n / BATCH, exchange_ms / 1000)
    return cluster.run()


def plans(cluster):
    return [effect.data for effect in cluster.effects if isinstance(effect, Emit) and effect.kind == "plan"]


def test_an_exchange_worth_hiding_is_hidden_and_the_reason_says_what_was_measured():
    cluster = auto([10, 10, 40, 40], exchange_ms=20)
    (plan,) = plans(cluster)
    assert plan["row"] == {"topology": "flat", "batch": "dbs", "overlap": 1}
    assert "4 workers take 10 to 40 ms per batch of 32 and 20 ms to exchange" in plan["reason"]
    second_epoch_s = max(cluster.ends[1].values()) - max(cluster.ends[0].values())
    assert BATCH * 200 / second_epoch_s == pytest.approx(plan["samples_per_s"], rel=0.1)


def test_a_short_exchange_is_not_worth_the_staleness():
    (plan,) = plans(auto([10, 10, 40, 40], exchange_ms=0.2))
    assert plan["row"]["overlap"] == 0


def test_what_the_user_rules_out_is_not_chosen():
    (plan,) = plans(auto([10, 10], exchange_ms=20, overrides={"overlap": 0}))
    assert plan["row"]["overlap"] == 0


def test_every_sample_is_trained_once_whatever_is_chosen():
    cluster = auto([10, 35, 40], exchange_ms=20)
    for epoch in range(2):
        assert set(cluster.trained[epoch].values()) == {1}
        assert len(cluster.trained[epoch]) == BATCH * 200


def test_a_decision_is_kept_while_what_it_hides_cannot_be_seen_and_changed_when_that_matters_no_more():
    autopilot = Autopilot(BATCH, overlap=1)
    assert autopilot.look(steps([20, 20], 20)).row.overlap == 1
    assert autopilot.look(steps([20, 20], 20, hidden=1.0)) is None
    assert autopilot.look(steps([21, 19], 20, hidden=0.9)) is None
    assert autopilot.look(steps([2000, 2000], 20, hidden=1.0)).row.overlap == 0
