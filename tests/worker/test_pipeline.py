"""Order in which a worker computes, sends and takes answers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.shard.in_process import InProcessClient
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.pipeline import Pipeline
from tests.support.shard_cluster import LAYOUT, Cluster, Reference


class SlowShards:
    """Client whose answers arrive at times that the test sets; it applies every push at once."""

    def __init__(self):
        self.version = self.sequence = self.pulls = 0
        self.arrived = set()
        self.computed_on = {}

    def pull(self, *, exact, kept=False):
        self.pulls += 1
        self.sequence += 1
        return Pulled(np.zeros(1, np.float32), (self.version,), self.sequence)

    def begin_push(self, gradient, *, computed_on, samples):
        self.sequence += 1
        self.version += 1
        self.computed_on[self.sequence] = computed_on
        pushed = Pushed(np.zeros(1, np.float32), (self.version,), 0, True, self.sequence)
        return _Answer(self, pushed)


class _Answer:
    def __init__(self, shards, pushed):
        self._shards, self._pushed = shards, pushed

    @property
    def arrived(self):
        return self._pushed.sequence in self._shards.arrived

    def result(self):
        return self._pushed


GRADIENT = np.zeros(1, np.float32)


def steps(pipeline, overlap, count):
    """Return the tags of the answers taken after each of ``count`` steps."""
    taken = []
    for tag in range(count):
        pipeline.weights()
        pipeline.send(tag, GRADIENT, samples=1)
        taken.append([tag for tag, _ in pipeline.await_replies(overlap)])
    return taken


@pytest.mark.parametrize(
    ("overlap", "taken", "computed_on"),
    [
        (0, [[0], [1], [2], [3]], [1, 2, 3, 4]),
        (1, [[], [0], [1], [2]], [1, 1, 2, 3]),
        (2, [[], [], [0], [1]], [1, 1, 1, 2]),
    ],
)
def test_answers_that_come_late_are_waited_for_as_late_as_may_be(overlap, taken, computed_on):
    shards = SlowShards()
    pipeline = Pipeline(shards)
    assert steps(pipeline, overlap, 4) == taken
    assert [shards.computed_on[push] for push in (2, 3, 4, 5)] == computed_on
    assert [tag for tag, _ in pipeline.await_replies(0)] == list(range(4 - overlap, 4))
    assert shards.pulls == 1


def test_an_answer_that_has_arrived_is_used_but_never_that_to_the_push_just_sent():
    shards = SlowShards()
    shards.arrived = set(range(100))
    assert steps(Pipeline(shards), 2, 4) == [[], [0], [1], [2]]


def test_a_worker_that_forgets_pulls_again():
    shards = SlowShards()
    pipeline = Pipeline(shards)
    steps(pipeline, 1, 2)
    pipeline.await_replies(0)
    pipeline.discard_weights()
    assert pipeline.weights().sequence == shards.sequence == 4
    assert shards.pulls == 2


def test_without_overlap_every_bit_is_that_of_one_push_after_the_other():
    def slope(weights):
        return (np.linspace(0.5, 3, LAYOUT.size, dtype=np.float32) * (weights - 0.3)).astype(np.float32)

    def client():
        cluster = Cluster(Reference(keras.optimizers.SGD(0.05, momentum=0.9)), rule="ddc")
        return InProcessClient(cluster.stores, LAYOUT, "w")

    plain, pipeline = client(), Pipeline(client())
    weights = plain.pull().weights
    for step in range(6):
        pipeline.send(step, slope(pipeline.weights().weights), samples=1)
        pipeline.await_replies(0)
        weights = plain.push(slope(weights), samples=1).weights
        assert np.array_equal(pipeline.weights().weights, weights)
