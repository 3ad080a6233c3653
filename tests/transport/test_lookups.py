"""Tables that the shards alone hold: workers look up rows, which are of the moment of a reply, and push others."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import Rows, RowVector, TableLayout, encode_numbers
from nfdt.core.errors import ProtocolError, ShapeMismatch, UsageError
from nfdt.core.sharding import tables_on_shards
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import LOOKUP, PULL, Frame
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.raw_stream import encode, exchange
from tests.support.shard_cluster import Reference, rule_spec

# The third of three shards has no part of a table.
LAYOUT = ParameterLayout.of([("first", (3000, 32)), ("kernel", (32, 4)), ("second", (1030, 64)), ("wide", (320, 250))])
TABLES = TableLayout.of(LAYOUT, (0, 2))
TOKEN = "t" * 32


@contextlib.contextmanager
def cluster(rule="ddc", *, shards=2, overlap=0, workers="ab", **options):
    made = Reference(keras.optimizers.SGD(0.1), layout=LAYOUT)
    manifest = made.manifest().replaced(tables=[0, 2], looked_up=[0, 2], divisible=True)
    algorithm = rule_spec(rule, overlap=overlap, worker_tables_mb=0)
    assert tables_on_shards(manifest, algorithm, shards)
    state, layout = State(made.weights), manifest.layout
    running = [
        start_shard(manifest, state, algorithm, i, shards, workers=2, token=TOKEN, leased=False) for i in range(shards)
    ]
    options = {"timeout_s": 60, "overlap": overlap, "tables": (0, 2), "looked_up": True, **options}
    addresses = [shard.address for shard in running]
    clients = [StreamClient(addresses, layout, name, worker_token(TOKEN, name), **options) for name in workers]
    try:
        yield running, clients
    finally:
        for end in (*(client.close for client in clients), *(shard.stop for shard in running)):
            end()


def numbers(seed):
    rng = np.random.default_rng(seed)
    return [np.sort(rng.choice(rows, 40, replace=False)).astype(np.int32) for rows in (3000, 1030)]


def gradient(seed):
    rng = np.random.default_rng(seed)
    rows = [Rows(i, rng.normal(size=(40, w)).astype(np.float32)) for i, w in zip(numbers(seed), (32, 64), strict=True)]
    return RowVector(rng.normal(size=TABLES.dense_size).astype(np.float32), tuple(rows))


def weights_of(running):
    return np.concatenate([shard.store.read()[0] for shard in running])


def assert_rows(found, wanted, flat):
    for rows, index, table in zip(found, wanted, TABLES.views(flat), strict=True):
        np.testing.assert_array_equal(rows.index, index)
        np.testing.assert_array_equal(rows.values, table[index])


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_and_weights_are_those_of_the_shards(shards, share_memory):
    with cluster(shards=shards, share_memory=share_memory) as (running, (client, _)):
        held = client.pull()
        for step in range(4):
            flat = weights_of(running)
            np.testing.assert_array_equal(held.weights, TABLES.dense(flat))
            assert_rows(client.begin_lookup(numbers(step), held.sequence).result(), numbers(step), flat)
            held = client.push(gradient(step), samples=1)
            assert not np.array_equal(weights_of(running), flat)


def test_rows_are_of_the_moment_of_the_reply_that_the_worker_holds():
    with cluster() as (running, (client, other)):
        held, before = client.pull(), weights_of(running)
        other.pull()
        for step in range(3):
            other.push(gradient(step), samples=1)
        assert_rows(client.begin_lookup(numbers(1), held.sequence).result(), numbers(1), before)
        newest = client.push(gradient(5), samples=1)
        assert_rows(client.begin_lookup(numbers(1), newest.sequence).result(), numbers(1), weights_of(running))


def test_a_lookup_behind_a_push_has_the_rows_of_its_reply():
    with cluster() as (running, (client, _)):
        client.pull()
        for step in range(3):
            push = client.begin_push(gradient(step), samples=1)
            lookup = client.begin_lookup(numbers(step + 1), push.sequence)
            found = lookup.result()
            assert push.arrived
            assert push.result().applied
            assert_rows(found, numbers(step + 1), weights_of(running))


def test_a_lookup_waits_for_pushes_on_their_way_and_one_that_is_dropped_blocks_nothing():
    with cluster(overlap=1) as (running, (client, _)):
        held, before = client.pull(), weights_of(running)
        first = client.begin_push(gradient(1), samples=1, computed_on=held.sequence)
        assert_rows(client.begin_lookup(numbers(1), held.sequence).result(), numbers(1), before)
        second = client.begin_push(gradient(2), samples=1, computed_on=held.sequence)
        assert first.result().versions == (1, 1)
        client.begin_lookup(numbers(2), second.sequence)
        assert second.result().versions == (2, 2)
        np.testing.assert_array_equal(client.pull().weights, TABLES.dense(weights_of(running)))


def test_a_lookup_without_rows_returns_none():
    none = [np.zeros(0, np.int32)] * 2
    with cluster() as (_, (client, _)):
        found = client.begin_lookup(none, client.pull().sequence).result()
        assert [rows.values.shape for rows in found] == [(0, 32), (0, 64)]


def test_bytes_are_those_of_the_rows_and_of_the_other_weights():
    with cluster(share_memory=False, workers="a") as (_, (client,)):
        sequence = client.pull().sequence
        assert client.bytes_received < 4 * TABLES.dense_size + 1000
        before = client.bytes_received
        client.begin_lookup(numbers(1), sequence).result()
        assert 0 < client.bytes_received - before - 40 * 4 * (32 + 64) < 300


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ([np.array([5, 5]), np.zeros(0)], ProtocolError, "rising numbers below"),
        ([np.array([7]), np.array([1030])], ProtocolError, "rising numbers below 1030"),
        ([np.array([-1]), np.zeros(0)], ProtocolError, "rising numbers below"),
        ([np.array([7])], ShapeMismatch, "at least"),
        ([np.zeros(0)] * 3, ShapeMismatch, "expected 8 bytes"),
    ],
)
def test_numbers_that_no_table_has_are_refused(asked, error, text):
    with cluster(shards=1, workers="a") as ((shard,), (client,)):
        client.pull()
        with pytest.raises(error, match=text):
            shard.store.lookup("a", encode_numbers([index.astype(np.int32) for index in asked]), 0)
        assert client.push(gradient(1), samples=1).applied


def test_a_lookup_before_the_first_pull_and_one_of_another_job_are_refused():
    with cluster(shards=1, workers="a") as ((shard,), (client,)):
        with pytest.raises(ProtocolError, match="expected a pull before"):
            client.begin_lookup(numbers(1), 0).result()
    made = Reference(keras.optimizers.SGD(0.1), layout=LAYOUT)
    shard = start_shard(
        made.manifest(), State(made.weights), rule_spec("ddc"), 0, 1, workers=1, token=TOKEN, leased=False
    )
    client = StreamClient([shard.address], LAYOUT, "a", worker_token(TOKEN, "a"), timeout_s=60)
    try:
        client.pull()
        with pytest.raises(UsageError, match="expected a client of tables"):
            client.begin_lookup(numbers(1), 0)
        with pytest.raises(ProtocolError, match="expected a job with tables"):
            shard.store.lookup("a", encode_numbers(numbers(1)), 0)
    finally:
        client.close()
        shard.stop()


def test_a_header_that_claims_too_many_bytes_ends_the_stream():

    with cluster(shards=1, workers="a") as ((shard,), _):
        pull = encode(Frame(kind=PULL, sequence=1, worker="b"))
        lookup = encode(Frame(kind=LOOKUP, sequence=2, worker="b", total_bytes=2**40))
        answers = exchange(shard.address, worker_token(TOKEN, "b"), [pull, lookup])
        assert "expected at most" in answers[-1].error
