"""Failures that only a network has: broken and hanging connections, wrong answers, refusals."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time

import grpc
import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import (
    AuthenticationFailed,
    NfdtError,
    ProtocolError,
    Refused,
    ServerUnreachable,
    ShapeMismatch,
    UsageError,
)
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.chunks import CHUNK_BYTES, encode_chunk, split
from nfdt.core.wire.connection import connect
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import (
    ERROR,
    PULL,
    PUSH,
    WEIGHTS,
    AdminReply,
    AdminRequest,
    Flush,
    ForgetWorker,
    Frame,
    ReadRequest,
    ShardLearningRate,
    StateChunk,
)
from nfdt.core.work.patience import Patience
from nfdt.model.program.state import State, dump_state, load_state
from nfdt.shard import exchange as shard_exchange
from nfdt.shard import listener, loop_engine
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support import raw_stream
from tests.support.eventually import eventually
from tests.support.raw_stream import encode
from tests.support.shard_cluster import LAYOUT, Reference, gradients, rule_spec, start_weights
from tests.support.streams import LARGE, RATE, TOKEN, WORKER_TOKEN, FrameRelay, exchange, serve


@pytest.fixture
def shard():
    running = serve()[0]
    yield running
    running.stop(0)


@pytest.fixture
def client(shard):
    made = StreamClient([shard.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20)
    yield made
    made.close()


def administer(address, request, token=TOKEN):
    with open_channel(address, token) as channel:
        call = channel.unary_unary("/nfdt.v1.Shard/Administer", AdminRequest.SerializeToString, AdminReply.FromString)
        return call(request, timeout=20)


def read(address, **fields):
    with open_channel(address, TOKEN) as channel:
        call = channel.stream_stream("/nfdt.v1.Shard/Read", ReadRequest.SerializeToString, StateChunk.FromString)
        chunks = list(call(iter([ReadRequest(**fields)]), timeout=20))
    assert [chunk.offset for chunk in chunks] == [0, *itertools.accumulate(len(chunk.data) for chunk in chunks[:-1])]
    return load_state(b"".join(chunk.data for chunk in chunks))


def write(address, data, token=TOKEN):
    frames = [encode_chunk(StateChunk(offset=p.start, total_bytes=len(data)), data[p]) for p in split(len(data))]
    with open_channel(address, token) as channel:
        return channel.stream_unary("/nfdt.v1.Shard/Write", None, AdminReply.FromString)(iter(frames), timeout=20)


@pytest.mark.parametrize("share_memory", [False, True])
def test_weights_of_many_chunks_arrive_unharmed_and_are_counted(share_memory):
    weights = np.arange(LARGE.size, dtype=np.float32)
    assert weights.nbytes > 2 * CHUNK_BYTES
    running = serve(LARGE, shards=2, weights=weights)
    addresses = [r.address for r in running]
    client = StreamClient(addresses, LARGE, "w", WORKER_TOKEN, timeout_s=60, share_memory=share_memory)
    try:
        assert np.array_equal(client.pull().weights, weights)
        gradient = np.random.default_rng(0).normal(size=LARGE.size).astype("f4")
        answer = client.push(gradient, samples=32)
        np.testing.assert_allclose(answer.weights, weights - np.float32(RATE) * gradient, rtol=1e-6, atol=1e-6)
        assert 2 * weights.nbytes < client.bytes_received < 2 * weights.nbytes + 10_000
        assert weights.nbytes < client.bytes_sent < weights.nbytes + 10_000
    finally:
        client.close()
        [r.stop(0) for r in running]


def test_a_gradient_is_measured_while_it_arrives_and_dropped_wherever_it_is_not_finite(monkeypatch):
    running = serve(LARGE)[0]
    lengths, push = [], running.store.push
    monkeypatch.setattr(
        running.store, "push", lambda *args, **more: lengths.append(args[1].length) or push(*args, **more)
    )
    client = StreamClient([running.address], LARGE, "w", WORKER_TOKEN, timeout_s=60, share_memory=False)
    client.pull()
    gradient = np.random.default_rng(0).normal(size=LARGE.size).astype("f4")
    assert client.push(gradient, samples=1).applied
    assert lengths == pytest.approx([np.linalg.norm(gradient.astype(np.float64))], rel=1e-5)
    for place in (0, LARGE.size // 2, LARGE.size - 1):
        gradient[:] = 1.0
        gradient[place] = np.nan
        answer = client.push(gradient, samples=1)
        assert (answer.applied, answer.versions) == (False, (1,))
    assert running.store.statistics()["dropped"] == 3
    client.close()
    running.stop(0)


@pytest.fixture
def held_updates(monkeypatch):
    """A shard whose updates have several parts, and the semaphore that each part waits for."""
    assert loop_engine.STRIPE == 2**18
    running = serve(LARGE, optimizer=keras.optimizers.SGD(RATE, momentum=0.9), rule="ddc")[0]
    running.store._engine.wait_for_steps()
    update, may_go_on = loop_engine.loops.update, threading.Semaphore(0)

    def update_when_asked(*arguments):
        assert may_go_on.acquire(timeout=60)
        update(*arguments)

    monkeypatch.setattr(loop_engine.loops, "update", update_when_asked)
    yield running, may_go_on
    may_go_on.release(100)
    running.stop(0)


@pytest.mark.parametrize("broken", [False, True])
def test_a_reply_leaves_while_its_push_is_applied_which_no_broken_connection_stops(held_updates, broken):
    shard, may_go_on = held_updates
    found = raw_stream.ticket(shard.address, WORKER_TOKEN)
    stream = FrameStream(connect("127.0.0.1", found.port, found.ticket, timeout_s=60))
    stream.send(Frame(kind=PULL, sequence=1, worker="w"))
    stream.receive_bytes(stream.receive_header().total_bytes)
    gradient = np.random.default_rng(0).normal(size=LARGE.size).astype("f4")
    push = Frame(kind=PUSH, sequence=2, worker="w", total_bytes=gradient.nbytes, parts=1, want_weights=True)
    stream.send(push, gradient)
    may_go_on.release()
    assert stream.receive_header().total_bytes == gradient.nbytes
    first, received = stream.receive_bytes(2**20), np.zeros(LARGE.size, np.float32)
    if broken:
        stream.close()
    may_go_on.release(100)
    if not broken:
        stream.receive_into(received[2**18 :])
    stream.close()
    client = StreamClient([shard.address], LARGE, "w", WORKER_TOKEN, timeout_s=60, share_memory=False)
    client._sequence = 1  # as if it had sent the push on the first stream
    again = client.push(gradient, samples=1)
    assert (again.applied, again.versions) == (False, (1,))
    assert again.weights[: 2**18].tobytes() == first
    assert broken or again.weights[2**18 :].tobytes() == received[2**18 :].tobytes()
    assert client.push(gradient, samples=1).versions == (2,)
    client.close()


@pytest.mark.parametrize(("share_memory", "threads"), [(False, True), (True, True), (False, False)])
def test_a_reply_that_leaves_in_parts_is_the_reply(share_memory, threads, monkeypatch):
    def no_thread():
        raise RuntimeError("can't start new thread")

    if not threads:
        monkeypatch.setattr(shard_exchange, "_running_executor", no_thread)
    running = serve(LARGE, rule="ddc")[0]
    client = StreamClient([running.address], LARGE, "w", WORKER_TOKEN, timeout_s=60, share_memory=share_memory)
    client.pull()
    for gradient in np.random.default_rng(0).normal(size=(3, LARGE.size)).astype("f4"):
        answer = client.push(gradient, samples=1)  # without momentum nothing is ahead of the weights
        np.testing.assert_array_equal(answer.weights, running.store.read()[0])
    client.close()
    running.stop(0)


def test_a_reply_that_cannot_be_completed_breaks_the_connection(held_updates, monkeypatch):
    shard, may_go_on = held_updates
    client = StreamClient([shard.address], LARGE, "w", WORKER_TOKEN, timeout_s=60, share_memory=False)
    client.pull()
    update, calls = loop_engine.loops.update, itertools.count()
    monkeypatch.setattr(loop_engine.loops, "update", lambda *given: [][0] if next(calls) == 1 else update(*given))
    may_go_on.release(100)
    with pytest.raises(NfdtError, match="expected all parts of the push before"):  # of the push that is sent again
        client.push(np.ones(LARGE.size, np.float32), samples=1)
    client.close()


@pytest.fixture
def relay(shard):
    made = FrameRelay(shard.address)
    yield made
    made.stop()


def test_a_push_whose_answer_is_lost_is_sent_again_and_applied_once(shard, relay):
    relay.lose_answers_to = {2}
    client = StreamClient([relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20)
    client.pull()
    g = gradients(1)[0]
    answer = client.push(g, samples=1)
    np.testing.assert_allclose(answer.weights, start_weights() - RATE * g, rtol=1e-5)
    assert (answer.applied, answer.versions) == (False, (1,))
    assert relay.streams == 2
    assert client.push(g, samples=1).applied
    assert shard.store.statistics()["duplicates"] == 1
    client.close()


def test_a_shard_that_is_cut_off_is_looked_for_and_the_push_applied_once(shard, relay):
    relay.lose_answers_to = {2}
    patience = Patience(60.0, threading.Event())
    client = StreamClient([relay.address], LAYOUT, "w", TOKEN, timeout_s=20, patience=patience)
    client.pull()
    relay.refusals = 3
    assert not client.push(gradients(1)[0], samples=1).applied
    assert shard.store.version == 1
    assert relay.refusals == 0
    assert patience.left_s == 60.0
    client.close()


def test_no_client_looks_for_a_shard_once_the_job_is_over(relay):
    stopped = threading.Event()
    client = StreamClient([relay.address], LAYOUT, "w", TOKEN, timeout_s=20, patience=Patience(3600.0, stopped))
    client.pull()
    relay.stop()
    timer = threading.Timer(0.1, stopped.set)
    timer.start()
    with pytest.raises(ServerUnreachable, match=relay.address):
        client.push(gradients(1)[0], samples=1)
    timer.join()
    client.close()


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("lost", [2, 3, 4])
def test_pushes_that_overlap_are_sent_again_in_order_and_applied_once(share_memory, lost):
    running = serve(overlap=2, codec="int8")[0]  # replies could be encoded: it keeps what it sent
    relay = FrameRelay(running.address)
    relay.lose_answers_to = {lost}
    client = StreamClient(
        [relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20, overlap=2, share_memory=share_memory
    )
    try:
        first, g = client.pull(), gradients(6)
        pending = [client.begin_push(x, samples=1, computed_on=first.sequence) for x in g[:3]]
        answers = [p.result() for p in pending]
        weights = [a.weights.copy() for a in answers]
        seen = np.array([a.versions[0] for a in answers])  # an answer that was lost comes again with newer weights
        assert (seen >= [1, 2, 3]).all()
        wanted = start_weights() - RATE * np.cumsum(g[:3], 0)[seen - 1]
        np.testing.assert_allclose(weights, wanted, rtol=1e-4, atol=1e-5)
        assert [a.staleness for a in answers] == [0, 1, 2]
        assert [client.push(x, samples=1).staleness for x in g[3:]] == [0, 0, 0]
        assert relay.streams == 2
        assert running.store.version == 6
    finally:
        client.close()
        relay.stop()
        running.stop(0)


def test_a_push_lasts_until_its_answer_arrives_whenever_it_is_taken(shard):
    client = StreamClient([shard.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20, overlap=1)
    client.pull()
    began = time.monotonic()
    pending = client.begin_push(gradients(1)[0], samples=1)
    assert eventually(lambda: pending.arrived)
    arrived = time.monotonic()
    assert eventually(lambda: time.monotonic() > arrived + 0.1)
    assert 0 < pending.result().seconds <= arrived - began
    client.close()


def test_all_pushes_in_flight_fail_when_the_shard_is_gone(relay):
    client = StreamClient([relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20, overlap=1)
    client.pull()
    relay.stop()
    pending = [client.begin_push(g, samples=1) for g in gradients(2)]
    for push in (*pending, *pending):
        with pytest.raises(ServerUnreachable, match=relay.address):
            push.result()
    client.close()


def test_a_stream_that_breaks_twice_names_the_shard(shard, relay):
    client = StreamClient([relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20)
    client.pull()
    relay.stop()
    with pytest.raises(ServerUnreachable, match=relay.address):
        client.push(gradients(1)[0], samples=1)
    client.close()


@pytest.mark.parametrize("shift", [1, -1])
def test_the_answer_to_another_request_is_not_taken(relay, shift):
    client = StreamClient([relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20, share_memory=False)
    client.pull()
    relay.shift = shift
    with pytest.raises(ProtocolError, match=f"expected the answer to request 2. Received: .*request {2 + shift}"):
        client.push(gradients(1)[0], samples=1)
    client.close()


def test_a_silent_shard_is_given_up_after_the_deadline(relay):
    relay.silent = True
    client = StreamClient([relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=0.2)
    with pytest.raises(ServerUnreachable, match=rf"{relay.address} did not answer within 0.2 s"):
        client.pull()
    client.close()


def test_a_shard_that_is_not_there_is_unreachable():
    client = StreamClient(["127.0.0.1:1"], LAYOUT, "w", WORKER_TOKEN, timeout_s=20)
    with pytest.raises(ServerUnreachable, match="127.0.0.1:1"):
        client.pull()
    client.close()


def test_a_wrong_token_is_refused(shard):
    client = StreamClient([shard.address], LAYOUT, "w", "other", timeout_s=20)
    with pytest.raises(AuthenticationFailed):
        client.pull()
    client.close()
    with pytest.raises(grpc.RpcError):
        administer(shard.address, AdminRequest(flush=Flush()), token="other")


def test_a_worker_with_another_model_gets_an_error(shard):
    other = ParameterLayout.of([("w", (5,))])
    client = StreamClient([shard.address], other, "w", WORKER_TOKEN, timeout_s=20)
    with pytest.raises(ProtocolError, match="expected 20 bytes of weights"):
        client.pull()
    with pytest.raises(ShapeMismatch, match=rf"{shard.address}.*expected 104 bytes"):
        client.push(np.zeros(5, np.float32), samples=1)
    client.close()


def test_a_gradient_of_another_size_is_refused_before_it_is_sent(client):
    with pytest.raises(ShapeMismatch, match="Gradient"):
        client.push(np.zeros(3, np.float32), samples=1)
    assert client.bytes_sent == 0


def test_more_addresses_than_variables_are_refused():
    with pytest.raises(UsageError, match="at most 4"):
        StreamClient(["127.0.0.1:1"] * 5, LAYOUT, "w", WORKER_TOKEN)


def test_a_push_before_a_pull_is_refused(client, shard):
    with pytest.raises(ProtocolError, match=rf"{shard.address}.*pull before the first push"):
        client.push(gradients(1)[0], samples=1)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([encode(Frame(kind=WEIGHTS, sequence=1, worker="w"))], "push, pull or lookup"),
        ([encode(Frame(kind=PUSH, sequence=1, worker="w" * 201))], "this worker's name"),
        ([encode(Frame(kind=PUSH, sequence=1, worker="w", total_bytes=2**40))], "expected 104 bytes"),
        ([encode(Frame(kind=PUSH, sequence=1, worker="w", total_bytes=104), bytes(100))], "after 100 of 104 bytes"),
        ([encode(Frame(kind=PULL, sequence=1, worker="w"))[:-1]], "truncated"),
        ([b"\xff" * 50], "at most 65536 bytes"),
        ([b"\x20\x00\x00\x00" + b"\xff" * 50], "expected a header"),
    ],
    ids=["wrong kind", "long name", "huge", "cut", "cut header", "garbage", "garbage header"],
)
def test_a_stream_that_breaks_the_rules_gets_one_error(shard, frames, message):
    answers = exchange(shard.address, frames)
    assert [a.kind for a in answers] == [ERROR]
    assert message in answers[0].error


def test_a_connection_without_a_good_ticket_is_closed(shard):
    used = raw_stream.ticket(shard.address, WORKER_TOKEN)
    FrameStream(connect("127.0.0.1", used.port, used.ticket, timeout_s=20)).close()
    for wrong in (used.ticket, bytes(32), b"short"):
        connection = connect("127.0.0.1", used.port, wrong, timeout_s=20)
        connection.shut_down(socket.SHUT_WR)
        stream = FrameStream(connection)
        assert stream.receive_header() is None
        stream.close()


def test_connections_that_show_nothing_are_bounded_and_leave_workers_alone(shard, client):
    client.pull()
    port = raw_stream.ticket(shard.address, WORKER_TOKEN).port
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            for _ in range(listener.MOST_ANONYMOUS + 1)
        ]
        assert silent[-1].recv(1) == b""
        assert client.push(gradients(1)[0], samples=1).applied


def test_a_connection_that_shows_nothing_is_closed(shard, monkeypatch):
    port = raw_stream.ticket(shard.address, WORKER_TOKEN).port
    monkeypatch.setattr(listener, "SHOW_TICKET_S", 0.05)
    with socket.create_connection(("127.0.0.1", port), 20) as silent:
        assert silent.recv(1) == b""


def test_tickets_are_bounded_and_expire(shard, monkeypatch):
    with pytest.raises(grpc.RpcError, match="Connections: expected at most 20"):
        [raw_stream.ticket(shard.address, WORKER_TOKEN) for _ in range(21)]
    now = time.monotonic()
    monkeypatch.setattr(listener.time, "monotonic", lambda: now + listener.TICKET_S + 1)
    assert raw_stream.ticket(shard.address, WORKER_TOKEN)


# -- administration


def test_the_learning_rate_reaches_the_shard(shard, client):
    client.pull()
    administer(shard.address, AdminRequest(learning_rate=ShardLearningRate(value=1.0)))
    g = gradients(1)[0]
    np.testing.assert_allclose(client.push(g, samples=1).weights, start_weights() - g, rtol=1e-5, atol=1e-6)


def test_a_forgotten_worker_is_refused_and_what_the_shard_has_of_its_tasks_is_returned(shard, client):
    client.pull()
    client.push(gradients(1)[0], samples=1, tasks=[5])
    reply = administer(shard.address, AdminRequest(forget=ForgetWorker(worker="w", tasks=[4, 5, 6])))
    assert (reply.version, list(reply.applied)) == (1, [5])
    with pytest.raises(ProtocolError, match="the job has given up"):
        client.push(gradients(1)[0], samples=1)


def test_the_state_can_be_read_and_written(client, shard):
    client.pull()
    client.push(gradients(1)[0], samples=1)
    state = read(shard.address)
    assert np.array_equal(state.weights, client.pull().weights)
    assert state.optimizer[0] == 1
    assert read(shard.address, weights_only=True).optimizer == {}
    assert write(shard.address, dump_state(start_weights(), {0: np.int64(40)}, {})).version == 2
    assert np.array_equal(client.pull().weights, start_weights())
    assert read(shard.address).optimizer[0] == 40
    with pytest.raises(grpc.RpcError, match="26"):
        write(shard.address, dump_state(np.zeros(3, "f4"), {}, {}))


def test_another_interface_needs_tls():
    reference = Reference(keras.optimizers.SGD(RATE))
    arguments = (reference.manifest(), State(start_weights(), {}), rule_spec("plain"), 0, 1)
    with pytest.raises(Refused, match="TLS"):
        start_shard(*arguments, workers=1, token=TOKEN, host="0.0.0.0", leased=False)


def test_closing_from_another_thread_ends_a_wait(relay):
    relay.silent = True
    client = StreamClient([relay.address], LAYOUT, "w", WORKER_TOKEN, timeout_s=20)
    relay.on_request = client.close
    with pytest.raises(ServerUnreachable):
        client.pull()
