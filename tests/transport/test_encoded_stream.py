"""Encoded pushes and answers on a real stream: broken connections and forged bytes."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, PULL, PUSH, WEIGHTS, Frame
from nfdt.transport.choice import make_choice
from nfdt.transport.stream import StreamClient
from tests.support.raw_stream import encode
from tests.support.shard_cluster import LAYOUT, gradients, start_weights
from tests.support.streams import LARGE, RATE, TOKEN, FrameRelay, exchange, serve


def choice(codec, size=LAYOUT.size):
    return make_choice(AlgorithmSpec(name="asgd", codec=codec), size)


@pytest.fixture
def shard():
    running = serve(overlap=2, codec="int4")[0]
    yield running
    running.stop(0)


@pytest.fixture
def relay(shard):
    made = FrameRelay(shard.address)
    yield made
    made.stop()


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_lost_answers_leave_both_ends_with_the_same_weights(shard, relay, share_memory, lost):
    relay.lose_answers_to = {lost}
    options = {"timeout_s": 20, "overlap": 2, "share_memory": share_memory, "choice": choice("int4")}
    client = StreamClient([relay.address], LAYOUT, "w", worker_token(TOKEN, "w"), **options)
    try:
        held, g = client.pull(), gradients(8)
        pending = [client.begin_push(x, samples=1, computed_on=held.sequence) for x in g[:3]]
        for x in g[3:]:
            held = pending.pop(0).result()
            shard_has = np.asarray(shard.store._backups.get("w", held.sequence).weights)
            assert np.array_equal(held.weights, shard_has)
            pending.append(client.begin_push(x, samples=1, computed_on=held.sequence))
        [p.result() for p in pending]
        owed = client._coding._feedback.residual
        expected = start_weights() - RATE * (g.sum(0) - owed)
        np.testing.assert_allclose(client.pull().weights, expected, rtol=1e-4, atol=1e-5)
        assert (relay.streams, shard.store.version) == (2, 8)
    finally:
        client.close()


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_many_chunks_arrive_and_only_what_is_encoded_is_counted(share_memory, codec):
    weights = np.linspace(-1, 1, LARGE.size, dtype=np.float32)
    running = serve(LARGE, shards=2, weights=weights, codec=codec)
    options = {"timeout_s": 60, "share_memory": share_memory, "choice": choice(codec, LARGE.size)}
    client = StreamClient([r.address for r in running], LARGE, "w", worker_token(TOKEN, "w"), **options)
    try:
        client.pull()
        gradient = np.random.default_rng(0).normal(size=LARGE.size).astype("f4")
        before = client.bytes_sent, client.bytes_received
        answer = client.push(gradient, samples=32)
        np.testing.assert_allclose(answer.weights, weights - np.float32(RATE) * gradient, atol=0.01)
        sent, received = client.bytes_sent - before[0], client.bytes_received - before[1]
        encoded = client.codecs["push"][codec]["bytes"]
        assert encoded < weights.nbytes * 0.52
        assert encoded < sent < encoded + 10_000
        assert encoded < received < encoded + 10_000
    finally:
        client.close()
        [r.stop(0) for r in running]


def int8(count=26):
    """Return a payload of ``count`` elements in one bucket."""
    return np.float32(1).tobytes() + bytes(count)


def pull(sequence):
    return encode(Frame(kind=PULL, sequence=sequence, worker="w"))


def push(payload=b"", **fields):
    header = {"kind": PUSH, "sequence": 2, "worker": "w", "codec": "int8", "total_bytes": 30, "parts": 1}
    return encode(Frame(**{**header, **fields}), payload)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (push(int8(), codec="zip"), "Codec: expected one of identity"),
        (push(int8(), codec="x" * 10_000), "Received: 'xxxx"),
        (push(int8(), reply_codec="zip"), "Codec: expected one of"),
        (push(int8(), total_bytes=2**60), "expected 30 bytes"),
        (push(int8(30), total_bytes=34), "expected 30 bytes"),
        (push(int8(10)), "after 14 of 30 bytes"),
        (push(codec="top-k", total_bytes=2**60), "at most 26 elements"),
        (push(np.array([26, 0], "<u4").tobytes(), codec="top-k", total_bytes=8), "rising places below 26"),
        (push(np.array([3, 2, 0, 0], "<u4").tobytes(), codec="top-k", total_bytes=16), "rising places below 26"),
        (push(shared=True), "no segment is mapped"),
    ],
    ids=[
        *("unknown", "long name", "unknown reply", "huge", "too many", "cut", "huge top-k"),
        *("place outside", "places out of order", "shared"),
    ],
)
def test_what_cannot_be_decoded_is_refused_and_the_shard_unharmed(shard, frame, message):
    answers = exchange(shard.address, [pull(1), frame])
    assert [a.kind for a in answers] == [WEIGHTS, ERROR]
    assert message in answers[1].error
    answers = exchange(shard.address, [pull(3), push(int8(), sequence=4)])
    assert [a.kind for a in answers] == [WEIGHTS, ACKNOWLEDGE]
    assert (answers[1].applied, answers[1].version) == (True, 1)


def test_a_made_up_scale_is_dropped_like_any_gradient_that_is_not_finite(shard):
    bad = push(np.float32(np.inf).tobytes() + bytes([1] * 26))
    answers = exchange(shard.address, [pull(1), bad])
    assert (answers[1].applied, answers[1].version) == (False, 0)


def test_a_shard_reports_its_time(shard):
    answer = exchange(shard.address, [pull(1)])[0]
    assert 0 < answer.served_us < 20e6
