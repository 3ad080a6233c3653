"""Staleness and weights of one worker with overlapping pushes, compared with the published formulas step by step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.shard.in_process import InProcessClient
from tests.support.numpy_shard import ahead
from tests.support.shard_cluster import LAYOUT, SHAPES, Cluster, Reference, start_weights

RATE = 0.05
STEPS = 9


def slope(weights):
    """Return the gradient of a quadratic; the weights that it is computed at affect every later step."""
    return (np.linspace(0.5, 3, LAYOUT.size) * (weights - 0.3)).astype(weights.dtype)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize(("rule", "momentum"), [("plain", 0.0), ("plain", 0.9), ("dc", 0.0), ("ddc", 0.9)])
def test_a_worker_that_computes_ahead_follows_the_published_formulas(rule, momentum, overlap):
    reference = Reference(keras.optimizers.SGD(RATE, momentum=momentum))
    cluster = Cluster(reference, rule=rule, shards=2, overlap=overlap)
    client = InProcessClient(cluster.stores, LAYOUT, "w", overlap=overlap)
    held, waiting, answers = client.pull(), [], []
    for _ in range(STEPS):
        waiting.append(client.begin_push(slope(held.weights), samples=1, computed_on=held.sequence))
        if len(waiting) > overlap:
            held = waiting.pop(0).result()
            answers.append(held)
    answers += [pending.result() for pending in waiting]

    staleness, weights, last = ahead(
        rule, start_weights(), [slope] * STEPS, overlap, momentum, RATE, [s for _, s in SHAPES]
    )
    assert [a.staleness for a in answers] == staleness == [min(step, overlap) for step in range(STEPS)]
    np.testing.assert_allclose([a.weights for a in answers], weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cluster.weights, last, rtol=1e-4, atol=1e-5)
