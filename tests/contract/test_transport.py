"""Promises of every transport: equal results for all ways between worker and shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.errors import ProtocolError, ShapeMismatch, UsageError
from tests.support.numpy_shard import ahead
from tests.support.shard_cluster import LAYOUT, SHAPES, Reference, gradients, start_weights
from tests.support.transports import InProcessShards, SharedMemoryShards, StreamedShards

TOKEN = "token"


@pytest.fixture(
    params=[InProcessShards, StreamedShards, SharedMemoryShards], ids=["in_process", "stream", "shared_memory"]
)
def transport(request):
    return request.param


@pytest.fixture(params=[1, 3], ids=["S=1", "S=3"])
def shards(request):
    return request.param


@pytest.fixture
def connect(transport, shards):
    """Make clients of one set of shards: ``connect(worker, rule=..., momentum=..., overlap=..., consistency=...)``."""
    made, clients = [], []

    def client(worker="a", rule="plain", momentum=0.9, overlap=0, **row):
        if not made:
            made.append(
                transport(Reference(keras.optimizers.SGD(0.1, momentum=momentum)), shards, rule, overlap, **row)
            )
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


@pytest.mark.parametrize("rule", ["plain", "ddc"])
def test_a_push_may_carry_a_factor_of_the_learning_rate(connect, rule):
    reference = Reference(keras.optimizers.SGD(0.1, momentum=0.9))
    client = connect(rule=rule, batch="dbs")
    client.pull()
    for g, rate in zip(gradients(3), (1.0, 0.25, 1.6), strict=True):
        reference.apply(rate * g)  # the same result with SGD
        answer = client.push(g, samples=32, rate=rate)
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
    a, b = connect("a", consistency="bsp"), connect("b")
    g = gradients(3)
    b.push(g[2], samples=1, round=1, part=2, parts=3, want_weights=False)
    b.push(g[1], samples=1, round=1, part=1, parts=3, want_weights=False)
    assert a.push(g[0], samples=1, round=1, part=0, parts=3, want_weights=False).versions == (1,) * shards
    np.testing.assert_allclose(a.pull().weights, start_weights() - 0.1 * g.mean(0), rtol=2e-5, atol=2e-6)


def test_a_round_is_applied_when_its_last_part_comes(connect, shards):
    a, b = connect("a", consistency="bsp"), connect("b")
    g = gradients(2)
    assert b.push(g[1], samples=1, round=1, part=1, parts=2, want_weights=False).versions == (0,) * shards
    assert a.push(g[0], samples=3, round=1, part=0, parts=2, want_weights=False).versions == (1,) * shards
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


# -- pushes that overlap


def push_ahead(client, gradients, overlap):
    """Push each gradient, computed ``overlap`` answers behind; return (staleness, weights of each answer)."""
    held, waiting, answers = client.pull(), [], []
    for g in gradients:
        waiting.append(client.begin_push(g, samples=1, computed_on=held.sequence))
        if len(waiting) > overlap:
            held = waiting.pop(0).result()
            answers.append((held.staleness, held.weights.copy()))
    answers += [(a.staleness, a.weights.copy()) for a in (p.result() for p in waiting)]
    return [staleness for staleness, _ in answers], np.array([weights for _, weights in answers])


@pytest.mark.parametrize(("rule", "momentum", "overlap"), [("plain", 0.9, 1), ("ddc", 0.9, 2)])
def test_gradients_computed_ahead_follow_the_trajectory_computed_by_hand(connect, rule, momentum, overlap):
    g = gradients(7)
    staleness, weights = push_ahead(connect(rule=rule, momentum=momentum, overlap=overlap), g, overlap)
    wanted_staleness, wanted, _ = ahead(rule, start_weights(), g, overlap, momentum, 0.1, [s for _, s in SHAPES])
    assert staleness == wanted_staleness == [min(step, overlap) for step in range(7)]
    np.testing.assert_allclose(weights, wanted, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_gradient_may_be_in_pieces(connect, overlap):
    client, g = connect(overlap=overlap, momentum=0.0), gradients(7)
    pieces = [Pieces.flat([part.copy() for part in np.array_split(one, 3)]) for one in g]
    start = client.pull().weights.copy()
    _, weights = push_ahead(client, pieces, overlap)
    np.testing.assert_allclose(weights, start - 0.1 * np.cumsum(g, axis=0), rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeMismatch, match="Gradient"):
        client.push(Pieces.flat([g[0][:3]]), samples=1)


def test_a_gradient_is_measured_against_the_weights_it_names(connect, shards):
    a, b = connect("a", overlap=2), connect("b")
    first, g = a.pull(), gradients(4)
    b.pull()
    pending = [a.begin_push(g[i], samples=1, computed_on=first.sequence) for i in range(2)]
    held, _ = [p.result() for p in pending]
    b.push(g[2], samples=1)
    assert (held.staleness, held.versions) == (0, (1,) * shards)
    late = a.push(g[3], samples=1, computed_on=held.sequence)
    assert late.staleness == 2  # a's own second, and b's


def test_answers_are_the_same_in_whatever_order_they_are_taken(connect):
    client = connect(overlap=2)
    first = client.pull()
    pending = [client.begin_push(g, samples=1, computed_on=first.sequence) for g in gradients(3)]
    assert [pending[i].result().staleness for i in (2, 0, 1, 2)] == [2, 0, 1, 2]
    assert all(p.arrived for p in pending)


def test_weights_stay_while_the_pushes_that_overlap_are_answered(connect):
    client = connect(overlap=2)
    first = client.pull()
    copy = first.weights.copy()
    pending = [client.begin_push(g, samples=1, computed_on=first.sequence) for g in gradients(2)]
    [p.result() for p in pending]
    assert np.array_equal(first.weights, copy)


def test_no_more_pushes_overlap_than_the_client_is_made_for(connect):
    client = connect(overlap=1)
    client.pull()
    pending = [client.begin_push(g, samples=1) for g in gradients(2)]
    with pytest.raises(UsageError, match=r"at most 1 unanswered ones before it.* Received: 2"):
        client.begin_push(gradients(1)[0], samples=1)
    with pytest.raises(UsageError, match="expected no unanswered push"):
        client.pull()
    pending[0].result()
    client.begin_push(gradients(1)[0], samples=1)


def test_weights_that_the_shard_no_longer_knows_are_refused(connect):
    client = connect()
    old = client.pull()
    client.push(gradients(1)[0], samples=1)
    with pytest.raises(ProtocolError, match="one of the answers.* Received: on answer 1"):
        client.push(gradients(1)[0], samples=1, computed_on=old.sequence)
