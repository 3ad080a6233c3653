"""One suite over every transport: whatever lies between worker and shards, the same happens."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.core.errors import ShapeMismatch
from nfdt.core.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.transport.in_process import InProcessClient
from nfdt.transport.stream import StreamClient
from tests.shard_cluster import LAYOUT, Cluster, Reference, gradients, rule_spec, start_weights

TOKEN = "token"


class InProcess:
    def __init__(self, reference, shards, rule):
        self.stores = Cluster(reference, shards=shards, rule=rule).stores

    def client(self, worker):
        return InProcessClient(self.stores, LAYOUT, worker)

    def stop(self):
        pass


class Stream:
    share_memory = False

    def __init__(self, reference, shards, rule):
        state = State(reference.weights, reference.state)
        arguments = (reference.manifest(), state, rule_spec(rule))
        self.running = [start_shard(*arguments, i, shards, workers=2, token=TOKEN) for i in range(shards)]

    def client(self, worker):
        addresses = [r.address for r in self.running]
        return StreamClient(addresses, LAYOUT, worker, TOKEN, timeout_s=20, share_memory=self.share_memory)

    def stop(self):
        [running.stop(0) for running in self.running]


class SharedMemory(Stream):
    share_memory = True


@pytest.fixture(params=[InProcess, Stream, SharedMemory], ids=["in_process", "stream", "shared_memory"])
def transport(request):
    return request.param


@pytest.fixture(params=[1, 3], ids=["S=1", "S=3"])
def shards(request):
    return request.param


@pytest.fixture
def connect(transport, shards):
    """Make clients of one set of shards: ``connect(worker, rule=..., momentum=...)``."""
    made, clients = [], []

    def client(worker="a", rule="plain"):
        if not made:
            made.append(transport(Reference(keras.optimizers.SGD(0.1, momentum=0.9)), shards, rule))
        clients.append(made[0].client(worker))
        return clients[-1]

    yield client
    [c.close() for c in clients]
    [c.close() for c in clients]  # closing twice is allowed
    [m.stop() for m in made]


@pytest.mark.parametrize("rule", ["plain", "ddc"])
def test_one_worker_equals_keras(connect, rule):
    reference = Reference(keras.optimizers.SGD(0.1, momentum=0.9))
    client = connect(rule=rule)
    assert np.array_equal(client.pull().weights, start_weights())
    for g in gradients(4):
        reference.apply(g)
        answer = client.push(g, samples=32)
        assert (answer.applied, answer.staleness) == (True, 0)
        np.testing.assert_allclose(answer.weights, reference.weights, rtol=2e-5, atol=2e-6)


def test_versions_count_per_shard(connect, shards):
    client = connect()
    assert client.pull().versions == (0,) * shards
    client.push(gradients(1)[0], samples=1)
    assert client.pull(min_version=1).versions == (1,) * shards


def test_staleness_is_what_this_worker_missed(connect):
    a, b = connect("a"), connect("b")
    a.pull(), b.pull()
    g = gradients(1)[0]
    assert [a.push(g, samples=1).staleness for _ in range(2)] == [0, 0]
    assert b.push(g, samples=1).staleness == 2


def test_weights_come_only_when_asked_for(connect):
    client = connect()
    client.pull()
    answer = client.push(gradients(1)[0], samples=1, want_weights=False)
    assert answer.weights is None
    assert answer.applied


def test_what_was_pulled_stays_as_it_was_until_this_worker_asks_again(connect):
    a, b = connect("a"), connect("b")
    first = a.pull().weights
    b.pull()
    b.push(gradients(1)[0], samples=1)
    b.pull()
    assert np.array_equal(first, start_weights())


def test_parts_that_wait_for_earlier_ones_are_kept(connect, shards):
    a, b = connect("a"), connect("b")
    g = gradients(3)
    b.push(g[2], samples=1, part=2, parts=3, want_weights=False)
    b.push(g[1], samples=1, part=1, parts=3, want_weights=False)
    assert a.push(g[0], samples=1, part=0, parts=3, want_weights=False).versions == (1,) * shards
    np.testing.assert_allclose(a.pull().weights, start_weights() - 0.1 * g.mean(0), rtol=2e-5, atol=2e-6)


def test_a_round_is_applied_when_its_last_part_comes(connect, shards):
    a, b = connect("a"), connect("b")
    g = gradients(2)
    assert b.push(g[1], samples=1, round=0, part=1, parts=2, want_weights=False).versions == (0,) * shards
    assert a.push(g[0], samples=3, round=0, part=0, parts=2, want_weights=False).versions == (1,) * shards
    wanted = start_weights() - 0.1 * (g[0] * 3 + g[1]) / 4
    np.testing.assert_allclose(a.pull(min_version=1).weights, wanted, rtol=2e-5, atol=2e-6)


def test_a_gradient_that_is_not_finite_is_not_applied(connect, shards):
    client = connect()
    client.pull()
    answer = client.push(np.full(LAYOUT.size, np.nan, np.float32), samples=1)
    assert (answer.applied, answer.versions) == (False, (0,) * shards)
    assert np.array_equal(answer.weights, start_weights())


@pytest.mark.parametrize("gradient", [np.zeros(3, np.float32), np.zeros(LAYOUT.size, np.float64)])
def test_another_size_or_type_is_refused(connect, gradient):
    client = connect()
    client.pull()
    with pytest.raises(ShapeMismatch, match="Gradient"):
        client.push(gradient, samples=1)
