"""Gradients that are applied together: means by the denominators of their losses, and sums of those of sums."""

from __future__ import annotations

import math
from functools import partial

import keras
import numpy as np
import pytest

from nfdt.shard.modes import MergedMode, RoundMode
from tests.support.shard_cluster import Cluster, Reference, gradients, start_weights

RATE = 0.1


def cluster(rule="plain", **options):
    return Cluster(Reference(keras.optimizers.SGD(RATE)), rule=rule, **options)


def moved(made):
    return (start_weights() - made.weights) / RATE


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(
    ("denominators", "weights"),
    [
        ((0, 0, 0), (0.2, 0.5, 0.3)),
        ((3, 1, 4), (0.375, 0.125, 0.5)),
        ((1e-20, 2, 2), (0, 0.5, 0.5)),
        ([math.inf] * 3, [1] * 3),
    ],
)
def test_a_round_is_the_union_of_its_parts(order, denominators, weights):
    made, g = cluster(mode=RoundMode), gradients(3)
    for part in order:
        fields = {"round": 1, "part": part, "parts": 3, "samples": (2, 5, 3)[part], "want_weights": False}
        made.push(g[part], f"w{part}", denominator=denominators[part], **fields)
    np.testing.assert_allclose(moved(made), np.average(g, axis=0, weights=weights) * sum(weights), rtol=1e-4, atol=1e-5)


def test_parts_without_any_weight_keep_what_is_not_divided():
    made, g = cluster(mode=RoundMode), gradients(2)
    for part in (0, 1):
        made.push(g[part], "a", round=1, part=part, parts=2, denominator=1e-20, want_weights=False)
    np.testing.assert_allclose(moved(made), g.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [3, 2])
@pytest.mark.parametrize("rule", ["plain", "staleness-scaled"])
@pytest.mark.parametrize("denominator", [0.0, 4.0, math.inf])
def test_a_merge_is_the_union_of_its_gradients_also_if_it_is_not_complete(rule, denominator, count):
    made, g = cluster(rule, mode=partial(MergedMode, count=3)), gradients(3)[:count]
    for worker in "abc":
        made.pull(worker)
    for worker, own in zip("abc", g, strict=False):
        made.push(own, worker, denominator=denominator, samples=3)
    made.stores[0].flush()
    np.testing.assert_allclose(moved(made), g.sum(0) if math.isinf(denominator) else g.mean(0), rtol=1e-4, atol=1e-5)


def test_late_gradients_of_sums_are_added_each_at_its_own_rate():
    made, g = cluster("staleness-scaled", mode=partial(MergedMode, count=2)), gradients(4)
    for worker in "ab":
        made.pull(worker)
    made.push(g[0], "a", denominator=math.inf), made.push(g[1], "a", denominator=math.inf)
    made.push(g[2], "a", denominator=math.inf), made.push(g[3], "a", denominator=math.inf)
    before = made.weights
    for own in g[:2]:
        assert made.push(own, "b", denominator=math.inf)[0].staleness in (2, 0)
    np.testing.assert_allclose((before - made.weights) / RATE, g[0] / 2 + g[1], rtol=1e-3, atol=1e-4)


def test_a_gradient_alone_is_applied_as_it_is():
    made, g = cluster(), gradients(1)[0]
    made.pull()
    made.push(g, denominator=math.inf)
    np.testing.assert_allclose(moved(made), g, rtol=1e-4, atol=1e-5)
