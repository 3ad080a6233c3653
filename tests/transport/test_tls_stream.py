"""Pushes and pulls over TLS: the same bytes, both directions at once, and no access without the right certificate."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

from nfdt.core.errors import ServerUnreachable
from nfdt.core.wire.connection import client_tls, connect
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import PULL, Frame
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.certificates import self_signed
from tests.support.shard_cluster import Reference, rule_spec
from tests.support.streams import LARGE, TOKEN

RATE = 0.5
TLS_ALERT = b"\x15"  # first byte of a record: RFC 8446, section 5.1
WEIGHTS = np.linspace(-1, 1, LARGE.size, dtype=np.float32)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    return {name: self_signed(directory, name) for name in ("server", "client", "stranger")}


@pytest.fixture(scope="module")
def shard(pairs):
    reference = Reference(keras.optimizers.SGD(RATE), layout=LARGE, weights=WEIGHTS)
    running = start_shard(
        reference.manifest(),
        State(WEIGHTS, reference.state),
        rule_spec("plain", overlap=2),
        0,
        1,
        workers=2,
        token=TOKEN,
        cert=pairs["server"].cert,
        key=pairs["server"].key,
        client_ca=pairs["client"].cert,
        leased=False,
    )
    yield running
    running.stop(0)


def client_of(shard, pairs, shown="client", worker="w", **options):
    security = {"ca_file": pairs["server"].cert, "cert_file": pairs[shown].cert, "key_file": pairs[shown].key}
    made = StreamClient(
        [shard.address],
        LARGE,
        worker,
        worker_token(TOKEN, worker),
        timeout_s=30,
        share_memory=False,
        **security,
        **options,
    )
    return contextlib.closing(made)


@pytest.mark.parametrize("overlap", [0, 2])
def test_large_pushes_arrive_unharmed(shard, pairs, overlap):
    gradient = np.random.default_rng(0).normal(size=LARGE.size).astype(np.float32)
    shard.store.write(WEIGHTS, {})
    with client_of(shard, pairs, worker=f"overlap {overlap}", overlap=overlap) as client:
        first = client.pull()
        assert np.array_equal(first.weights, WEIGHTS)
        pending = [client.begin_push(gradient, samples=1, computed_on=first.sequence) for _ in range(overlap + 1)]
        weights = [push.result().weights.copy() for push in pending][-1]
        np.testing.assert_allclose(weights, WEIGHTS - (overlap + 1) * RATE * gradient, rtol=1e-5, atol=1e-5)


def test_a_worker_with_another_certificate_is_refused(shard, pairs):
    with client_of(shard, pairs, shown="stranger") as client, pytest.raises(ServerUnreachable, match=shard.address):
        client.pull()


def test_plain_text_is_refused_where_tls_is_spoken(shard, pairs):
    with client_of(shard, pairs) as client:
        client.pull()
        ticket = shard._listener.ticket("w")
        connection, received = connect("127.0.0.1", shard._listener.port, ticket, timeout_s=20), bytearray(64)
        with contextlib.suppress(ConnectionResetError):
            count = connection.receive(memoryview(received))
            assert received[: min(count, 1)] in (b"", TLS_ALERT)
        connection.close()
        client.pull()


def test_a_ticket_is_no_good_without_a_certificate(shard, pairs):
    tls = client_tls(pairs["server"].cert, None, None)
    ticket = shard._listener.ticket("w")
    with pytest.raises((OSError, EOFError)):
        exchange_hello(connect("127.0.0.1", shard._listener.port, ticket, timeout_s=20, tls=tls))


def exchange_hello(connection):
    stream = FrameStream(connection)
    try:
        stream.send(Frame(kind=PULL, sequence=1, worker="w"))
        if stream.receive_header() is None:
            raise EOFError("The shard has closed the connection.")
    finally:
        stream.close()
