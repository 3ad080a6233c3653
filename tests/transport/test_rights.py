"""Rights of the holder of a worker's token at a shard: to train as this worker, and nothing else."""

from __future__ import annotations

import contextlib

import grpc
import keras
import numpy as np
import pytest

from nfdt.core.errors import AuthenticationFailed
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire import shards_pb2 as pb
from nfdt.core.wire import shards_pb2_grpc
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.job_token import task_ticket, worker_token
from nfdt.core.wire.shards_pb2 import ERROR, PULL, PUSH, WEIGHTS, Frame
from nfdt.model.program.state import State, dump_state
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support import raw_stream
from tests.support.raw_stream import encode
from tests.support.shard_cluster import LAYOUT, Reference, gradients, start_again, start_weights

KEY = "the job's key"
SIZE = 4 * LAYOUT.size


@contextlib.contextmanager
def served(preset="asgd", *, leased=False):
    reference = Reference(keras.optimizers.SGD(0.1))
    state = State(reference.weights, reference.state)
    running = start_shard(
        reference.manifest(), state, resolve_algorithm(preset), 0, 1, workers=2, token=KEY, leased=leased
    )
    yield running
    running.stop(0)


@pytest.fixture(scope="module")
def shard():
    with served() as running:
        yield running


@pytest.fixture
def good(shard):
    client = StreamClient([shard.address], LAYOUT, "good", worker_token(KEY, "good"), timeout_s=20)
    client.pull()
    yield client
    client.close()
    start_again(shard.store, "good")


def pull(sequence=1, **fields):
    return encode(Frame(kind=PULL, sequence=sequence, **fields))


def push(values, sequence=2, **fields):
    return encode(Frame(kind=PUSH, sequence=sequence, total_bytes=SIZE, **fields), values.astype(np.float32).tobytes())


def send(running, messages, worker="bad"):
    """Return the answers' kinds, and the error of the last one."""
    answers = raw_stream.exchange(running.address, worker_token(KEY, worker), messages)
    return [answer.kind for answer in answers], answers[-1].error


CALLS = {
    "flush": lambda stub: stub.Administer(pb.AdminRequest(flush=pb.Flush()), timeout=20),
    "rate": lambda stub: stub.Administer(pb.AdminRequest(learning_rate=pb.ShardLearningRate(value=9.0)), timeout=20),
    "statistics": lambda stub: stub.Administer(pb.AdminRequest(statistics=pb.ShardStatistics()), timeout=20),
    "forget": lambda stub: stub.Administer(pb.AdminRequest(forget=pb.ForgetWorker(worker="good")), timeout=20),
    "read": lambda stub: list(stub.Read(iter([pb.ReadRequest()]), timeout=20)),
    "write": lambda stub: stub.Write(iter([pb.StateChunk(total_bytes=len(STATE), data=STATE)]), timeout=20),
}
STATE = dump_state(np.zeros(LAYOUT.size, np.float32), {}, {})


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_worker_s_token_administers_nothing(shard, good, call):
    with open_channel(shard.address, worker_token(KEY, "good")) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            call(shards_pb2_grpc.ShardStub(channel))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert good.push(gradients(1)[0], samples=1).applied


@pytest.mark.parametrize("token", [KEY, worker_token("another key", "good"), "good:" + "0" * 64])
def test_no_other_token_opens_a_stream(shard, token):
    client = StreamClient([shard.address], LAYOUT, "good", token, timeout_s=20)
    with pytest.raises(AuthenticationFailed):
        client.pull()
    client.close()


def test_a_worker_cannot_push_as_another_one(shard, good):
    before = shard.store.version
    replaced_push = push(np.full(LAYOUT.size, 9.0), sequence=2, worker="good")
    kinds, error = send(shard, [pull(), replaced_push])
    assert kinds == [WEIGHTS, ERROR]
    assert "Stream of bad: expected this worker's name" in error
    assert shard.store.version == before
    assert good.push(gradients(1)[0], samples=1).applied


@pytest.mark.parametrize("sequence", [2**64 - 1, 4, 1])
def test_a_request_out_of_order_ends_the_stream_and_changes_nothing(shard, good, sequence):
    before = shard.store.version
    kinds, error = send(shard, [pull(), push(gradients(1)[0], sequence=sequence)])
    assert kinds == [WEIGHTS, ERROR]
    assert "numbered in order" in error
    assert shard.store.version == before
    assert send(shard, [pull(2), push(gradients(1)[0], sequence=3)])[0][-1] != ERROR
    assert shard.store.version == before + 1
    start_again(shard.store, "bad")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"round": 1, "part": 0, "parts": 2}, "the job has no rounds"),
        ({"parts": 1, "round": 1}, "the job has no rounds"),
        ({"rate": 3e38}, "factor of the learning rate of 1"),
        ({"rate": 0.5}, "factor of the learning rate of 1"),
    ],
)
def test_what_the_job_does_not_have_is_refused(shard, good, fields, message):
    before = shard.store.version
    _, error = send(shard, [pull(), push(gradients(1)[0], **fields)])
    assert message in error
    assert shard.store.version == before
    assert good.push(gradients(1)[0], samples=1).applied
    start_again(shard.store, "bad")


@pytest.mark.parametrize(
    "fields", [{"parts": 1}, {"round": 2**32 - 1, "parts": 1}, {"round": 2, "parts": 2}, {"round": 1, "parts": 3}]
)
def test_a_job_in_rounds_takes_only_the_parts_of_its_open_round(fields):
    with served("bsp") as running:
        _, error = send(running, [pull(), push(gradients(1)[0], **fields)])
        assert "expected a part of round 1, which has at most 2 parts" in error
        for part, name in enumerate(["good", "better"]):
            whole = push(gradients(1)[0], round=1, part=part, parts=2)
            assert send(running, [pull(), whole], worker=name)[0][-1] != ERROR
        assert running.store.version == 1
        np.testing.assert_allclose(running.store.read()[0], start_weights() - 0.1 * gradients(1)[0], rtol=1e-5)


@pytest.mark.parametrize("value", [3e38, -3e38, 1e30, np.inf, np.nan])
def test_a_push_that_would_spoil_the_weights_is_refused_and_counted(shard, good, value):
    weights, before = shard.store.read()[0], shard.store.statistics()["dropped"]
    kinds, _ = send(shard, [pull(), push(np.full(LAYOUT.size, value))])
    assert kinds[-1] != ERROR
    assert np.array_equal(shard.store.read()[0], weights)
    found = shard.store.statistics()
    assert found["dropped"] == before + 1 == found["workers"]["bad"]["dropped"]
    assert good.push(gradients(1)[0], samples=1).applied
    start_again(shard.store, "bad")


def leased_push(*tasks, worker="bad", key=KEY, round=0, part=0, **fields):
    """Return a push with the tickets of these tasks, as they are leased to the worker."""
    tickets = b"".join(task_ticket(key.encode(), worker.encode(), task, round, part) for task in tasks)
    return push(np.ones(LAYOUT.size), **{"tasks": tasks, "tickets": tickets, "round": round, "part": part, **fields})


@pytest.mark.parametrize(
    "unleased",
    [
        push(np.ones(LAYOUT.size)),
        push(np.ones(LAYOUT.size), tasks=[0]),
        push(np.ones(LAYOUT.size), tickets=bytes(16)),
        leased_push(0, tasks=[1]),
        leased_push(0, tasks=[0, 1]),
        leased_push(0, tickets=task_ticket(KEY.encode(), b"bad", 0)[:-1]),
        leased_push(0, worker="good"),
        leased_push(0, key="the key before the shards were restored"),
        leased_push(0, 1, tasks=[0, 0]),
    ],
)
def test_a_push_without_a_leased_task_is_refused(unleased):
    with served(leased=True) as running:
        kinds, error = send(running, [pull(), unleased])
        assert kinds == [WEIGHTS, ERROR]
        assert "Push from worker bad: expected the gradient of tasks that are leased to it" in error
        assert "Ask the job server for work, and push the tasks that it leases" in error
        assert running.store.version == 0
        assert send(running, [pull(), leased_push(0)])[0][-1] != ERROR
        assert send(running, [pull(), leased_push(1, 2, worker="good")], worker="good")[0][-1] != ERROR
        assert running.store.version == 2


def test_a_leased_task_can_be_pushed_once():
    with served(leased=True) as running:
        kinds, _ = send(running, [pull(), leased_push(7), *(leased_push(7, sequence=number) for number in (3, 4))])
        assert ERROR not in kinds
        assert running.store.version == 1


def test_a_part_of_a_round_cannot_be_pushed_as_another_one():
    with served("bsp", leased=True) as running:
        first = task_ticket(KEY.encode(), b"bad", 0, 1, 0)
        _, error = send(running, [pull(), leased_push(0, round=1, part=1, parts=2, tickets=first)])
        assert "leased to it" in error
        assert send(running, [pull(), leased_push(0, round=1, part=0, parts=2, tickets=first)])[0][-1] != ERROR
