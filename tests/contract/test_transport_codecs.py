"""Every codec over every transport: lost answers arrive later, and both ends always hold the same weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.codecs import make_codec
from nfdt.core.specs.presets import AXES
from nfdt.shard import messages
from nfdt.transport.choice import CodecChoice, make_choice
from tests.support.shard_cluster import LAYOUT, Reference, gradients, rule_spec, start_again, start_weights
from tests.support.transports import InProcessShards, SharedMemoryShards, StreamedShards

RATE = 0.1
LOSSY = [name for name in AXES["codec"] if name not in ("identity", "adaptive")]
every_codec = pytest.mark.parametrize("codec", LOSSY)
coarse_codecs = pytest.mark.parametrize("codec", ["int4", "top-k"])


@pytest.fixture(
    params=[InProcessShards, StreamedShards, SharedMemoryShards], ids=["in_process", "stream", "shared_memory"]
)
def connect(request):
    """Make clients of two shards: ``connect(worker, codec, rule=..., overlap=...)``; ``connect.stores``."""
    made, clients = [], []

    def client(worker="a", codec="int8", rule="plain", momentum=0.0, overlap=0, **row):
        if not made:
            reference = Reference(keras.optimizers.SGD(RATE, momentum=momentum))
            made.append(request.param(reference, 2, rule, overlap, codec, **row))
            client.stores = made[0].stores
        algorithm = rule_spec(rule, codec=codec, top_k=0.2)
        clients.append(made[0].client(worker, choice=make_choice(algorithm, LAYOUT.size)))
        return clients[-1]

    yield client
    [c.close() for c in clients]
    [m.stop() for m in made]


def backup(stores, worker, sequence):
    """Return the weights that the worker holds according to the shards."""
    return np.concatenate([np.asarray(s._backups.get(worker, sequence).weights) for s in stores])


@every_codec
def test_all_that_was_pushed_arrives_but_for_the_last_residual(connect, codec):
    client = connect(codec=codec)
    client.pull()
    g = gradients(30)
    for gradient in g:
        assert client.push(gradient, samples=1).applied
    owed = client._coding._feedback.residual
    arrived = (start_weights() - client.pull().weights) / RATE
    np.testing.assert_allclose(arrived + owed, g.sum(0), rtol=1e-4, atol=1e-4)
    assert np.linalg.norm(owed) < 3 * np.linalg.norm(g[0])


@pytest.mark.parametrize(("codec", "overlap"), [*((codec, 2) for codec in LOSSY), ("int4", 0)])
def test_worker_and_shards_hold_the_same_bits(connect, codec, overlap):
    a, b = connect("a", codec, rule="ddc", momentum=0.9, overlap=overlap), connect("b", codec)
    held, waiting = a.pull(), []
    b.pull()
    for gradient in gradients(12):
        waiting.append(a.begin_push(gradient, samples=1, computed_on=held.sequence))
        b.push(gradient, samples=1)
        if len(waiting) > overlap:
            held = waiting.pop(0).result()
        assert np.array_equal(held.weights, backup(connect.stores, "a", held.sequence))
    [pending.result() for pending in waiting]
    assert not np.array_equal(held.weights, a.pull().weights)
    assert set(a.codecs["reply"]) == {"identity", "int8" if codec == "top-k" else codec}


@coarse_codecs
def test_what_answers_lose_comes_with_later_answers(connect, codec):
    client = connect(codec=codec)
    client.pull()
    client.push(gradients(1)[0], samples=1)
    far = [client.pull(exact=False).weights.copy() for _ in range(60)][-1]
    np.testing.assert_allclose(far, client.pull().weights, rtol=1e-5, atol=1e-6)


@coarse_codecs
def test_rounds_are_merged_and_pulled(connect, codec):
    a, b = connect("a", codec, consistency="bsp"), connect("b", codec)
    weights = [a.pull().weights, b.pull().weights]
    g = gradients(20)
    for number in range(10):
        for part, (client, vector) in enumerate(zip((a, b), g[2 * number :], strict=False)):
            client.push(vector, samples=1, round=number + 1, part=part, parts=2, want_weights=False)
        weights = [client.pull(min_version=number + 1, exact=False).weights for client in (a, b)]
    exact = a.pull()
    assert exact.versions == (10, 10)
    assert all(np.abs(w - exact.weights).max() < 0.5 for w in weights)
    assert {name for name in a.codecs["push"]} == {codec}


@coarse_codecs
def test_a_gradient_that_is_not_finite_is_dropped_and_owes_nothing(connect, codec):
    client = connect(codec=codec)
    client.pull()
    g = gradients(2)
    client.push(g[0], samples=1)
    before, owed = client.pull().weights.copy(), client._coding._feedback.residual.copy()
    bad = g[1].copy()
    bad[0] = np.nan  # on the first shard only: both drop it
    answer = client.push(bad, samples=1)
    assert (answer.applied, answer.versions) == (False, (1, 1))
    assert np.array_equal(client.pull().weights, before)
    assert np.array_equal(client._coding._feedback.residual, owed)
    assert client.push(g[1], samples=1).applied


def test_weights_that_are_not_finite_are_sent_whole(connect):
    client = connect(codec="int4")
    client.pull()
    for store in connect.stores:
        store.write(np.full(store.size, np.inf, np.float32), {})
    assert np.isinf(client.push(gradients(1)[0], samples=1).weights).all()
    assert np.isinf(client.push(gradients(1)[0], samples=1).weights).all()
    for store in connect.stores:
        store.write(np.ones(store.size, np.float32), {})
    assert np.isfinite(client.push(gradients(1)[0], samples=1).weights).all()


def test_weights_that_were_replaced_are_sent_whole(connect):
    client = connect(codec="int4")
    client.pull()
    g = gradients(3)
    client.push(g[0], samples=1)
    wholes = client.codecs["reply"]["identity"]["messages"]
    for store in connect.stores:
        store.write(np.full(store.size, 100, np.float32), {})
    assert np.allclose(client.push(g[1], samples=1).weights, 100, atol=1)
    assert client.codecs["reply"]["identity"]["messages"] == wholes + 1
    client.push(g[2], samples=1)
    assert client.codecs["reply"]["identity"]["messages"] == wholes + 1


def test_all_weights_are_sent_from_time_to_time(connect, monkeypatch):
    monkeypatch.setattr(messages, "RESYNC_AFTER", 3)
    client = connect(codec="int8")
    client.pull()
    for gradient in gradients(8):
        client.push(gradient, samples=1)
    uses = client.codecs["reply"]
    assert (uses["identity"]["messages"], uses["int8"]["messages"]) == (3, 6)


def test_a_worker_whose_codecs_change_loses_nothing(connect):
    client = connect(codec="int4")
    choice = client._coding._choice
    client.pull()
    g = gradients(24)
    for number, gradient in enumerate(g):
        choice.push, choice.reply = (make_codec(AXES["codec"][(number + i) % 6], top_k=0.2) for i in (0, 3))
        client.push(gradient, samples=1)
    choice.push = make_codec("identity", top_k=0.2)
    held = client.push(np.zeros_like(g[0]), samples=1)
    assert np.array_equal(held.weights, backup(connect.stores, "a", held.sequence))
    np.testing.assert_allclose(client.pull().weights, start_weights() - RATE * g.sum(0), rtol=1e-4, atol=1e-5)
    assert set(client.codecs["push"]) == set(client.codecs["reply"]) == set(AXES["codec"][:6])
    assert client.codecs["residual"] == 0


def test_a_worker_that_comes_back_is_sent_all_weights(connect):
    first = connect("a", "int4")
    first.pull()
    first.push(gradients(1)[0], samples=1)
    for store in connect.stores:
        start_again(store, "a")
    again = connect("a", "int4")
    assert np.array_equal(again.pull(exact=False).weights, first.pull().weights)
    assert set(again.codecs["reply"]) == {"identity"}


def test_nothing_is_encoded_unless_asked_for():
    assert make_choice(rule_spec("ddc"), 100) is None
    assert type(make_choice(rule_spec("ddc", reply_codec="int8"), 100)) is CodecChoice
