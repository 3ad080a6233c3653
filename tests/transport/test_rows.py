"""Two workers, two shards with parts of two tables: each worker holds the weights of the shards."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import Rows, RowVector, RowWeights, TableLayout
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.core.sharding import sparse_tables
from nfdt.core.wire.job_token import worker_token
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.shard_cluster import Reference, rule_spec

SHAPES = [("first", (3000, 32)), ("kernel", (32, 4)), ("second", (1030, 64)), ("bias", (4,))]
TOKEN = "t" * 32


class Holder:
    """Copy of the weights on a worker, updated by the answers of its client."""

    def __init__(self, client, split):
        self.client, self.split = client, split
        self.flat = np.array(client.pull(exact=False).weights)
        self.sequence = 0

    def take(self, weights):
        if not isinstance(weights, RowWeights):
            self.flat = np.array(weights)
            return
        tables = [np.array(table) for table in self.split.views(self.flat)]
        for news in weights.pop_changes():
            own = tables[news.table][news.first :]
            if isinstance(news.rows, Rows):
                own[news.rows.index] = news.rows.values
            else:
                own[: len(news.rows)] = news.rows
        self.flat = self.split.join(weights.dense, tables)


@pytest.fixture
def program():
    made = Reference(keras.optimizers.SGD(0.1), layout=ParameterLayout.of(SHAPES))
    return made.manifest().replaced(tables=[0, 2]), State(made.weights)


@contextlib.contextmanager
def cluster(program, algorithm, **options):
    manifest, _ = program
    layout = manifest.layout
    running = [start_shard(*program, algorithm, index, 2, workers=2, token=TOKEN, leased=False) for index in range(2)]
    tables = sparse_tables(manifest, algorithm, 2)
    assert tables == (0, 2)
    addresses = [shard.address for shard in running]
    options = {"timeout_s": 60, "overlap": algorithm.overlap, "tables": tables, **options}
    clients = [StreamClient(addresses, layout, name, worker_token(TOKEN, name), **options) for name in "ab"]
    try:
        yield running, [Holder(client, TableLayout.of(layout, tables)) for client in clients]
    finally:
        for end in (*(client.close for client in clients), *(shard.stop for shard in running)):
            end()


def gradient(seed):
    rng = np.random.default_rng(seed)
    index = [np.sort(rng.choice(rows, 20, replace=False)).astype(np.int32) for rows in (3000, 1030)]
    rows = [Rows(i, rng.normal(size=(20, w)).astype(np.float32)) for i, w in zip(index, (32, 64), strict=True)]
    return RowVector(rng.normal(size=132).astype(np.float32), tuple(rows))


def shards_weights(running):
    return np.concatenate([shard.store.read()[0] for shard in running])


@pytest.mark.parametrize("share_memory", [False, True])
def test_a_worker_holds_what_the_shards_have(program, share_memory):
    with cluster(program, rule_spec("ddc"), share_memory=share_memory) as (running, holders):
        for step in range(8):
            holder = holders[step % 3 % 2]
            pushed = holder.client.push(gradient(step), samples=1)
            assert isinstance(pushed.weights, RowWeights)
            holder.take(pushed.weights)
            np.testing.assert_array_equal(holder.flat, shards_weights(running))
        exact = holders[0].client.pull().weights
        np.testing.assert_array_equal(exact, shards_weights(running))
        assert shards_weights(running).any()
        size = 4 * exact.size
        for holder in holders:
            assert holder.client.bytes_sent < size / 4


def test_answers_that_are_skipped_lose_nothing(program):
    algorithm = rule_spec("ddc", overlap=2)
    with cluster(program, algorithm) as (running, (holder, other)):
        for step in range(0, 6, 2):
            pending = [holder.client.begin_push(gradient(step + i), samples=1) for i in range(2)]
            other.client.push(gradient(10 + step), samples=1)
            answers = [each.result() for each in pending]
            holder.take(answers[-1].weights)
        holder.take(holder.client.pull(exact=False).weights)
        np.testing.assert_array_equal(holder.flat, shards_weights(running))


def test_weights_written_to_the_shards_come_whole(program):
    with cluster(program, rule_spec("ddc")) as (running, (holder, _)):
        holder.take(holder.client.push(gradient(1), samples=1).weights)
        for shard in running:
            shard.store.write(np.full(shard.store.size, 3, np.float32), {})
        pulled = holder.client.pull(exact=False).weights
        np.testing.assert_array_equal(pulled, np.full(pulled.size, 3))
        holder.take(holder.client.push(gradient(2), samples=1).weights)
        np.testing.assert_array_equal(holder.flat, shards_weights(running))


def test_a_gradient_of_another_model_is_refused(program):
    with cluster(program, rule_spec("ddc")) as (_, (holder, _)):
        with pytest.raises(ShapeMismatch, match="expected 132 elements beside 2 tables"):
            holder.client.push(RowVector(np.zeros(3, np.float32), ()), samples=1)
        with pytest.raises(ShapeMismatch, match="Gradient"):
            holder.client.push(np.zeros(3, np.float32), samples=1)


def test_rows_for_a_shard_without_tables_are_refused(program):
    manifest, state = program
    algorithm = rule_spec("ddc", sparse=False)
    running = start_shard(manifest, state, algorithm, 0, 1, workers=1, token=TOKEN, leased=False)
    layout = manifest.layout
    client = StreamClient([running.address], layout, "w", worker_token(TOKEN, "w"), timeout_s=60, tables=(0, 2))
    try:
        client.pull()
        with pytest.raises((ShapeMismatch, ProtocolError)):
            client.push(gradient(1), samples=1)
    finally:
        client.close()
        running.stop()


def test_a_shard_without_a_part_of_a_table_applies_pushes_of_rows():
    layout = ParameterLayout.of([("table", (3000, 32)), ("wide", (200, 480))])
    made = Reference(keras.optimizers.SGD(0.1), layout=layout)
    program = made.manifest().replaced(tables=[0]), State(made.weights)
    algorithm = rule_spec("ddc")
    running = [start_shard(*program, algorithm, i, 2, workers=1, token=TOKEN, leased=False) for i in range(2)]
    client = StreamClient([shard.address for shard in running], layout, "w", worker_token(TOKEN, "w"), tables=(0,))
    try:
        holder = Holder(client, TableLayout.of(layout, (0,)))
        rows = Rows(np.array([3, 7], np.int32), np.ones((2, 32), np.float32))
        for _ in range(2):
            holder.take(client.push(RowVector(np.ones(96_000, np.float32), (rows,)), samples=1).weights)
            np.testing.assert_array_equal(holder.flat, shards_weights(running))
        assert not np.array_equal(holder.flat, made.weights)
    finally:
        client.close()
        for shard in running:
            shard.stop()
