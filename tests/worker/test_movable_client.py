"""Move of a worker's client to shards that were restored at other addresses, with another key."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import RowWeights
from nfdt.core.errors import AuthenticationFailed, ShapeMismatch
from nfdt.core.wire.job_token import worker_token
from nfdt.core.work import instructions as ins
from nfdt.core.work.slot_connection import Patience
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.transport.choice import make_choice
from nfdt.transport.stream import StreamClient
from nfdt.worker.movable_client import MovableClient, ShardMoves
from nfdt.worker.pipeline import ShardsMoved
from tests.support.shard_cluster import Reference, gradients, rule_spec

HANGS_S = 120.0
NEVER_S = 3600.0
SHAPES = [("table", (3000, 32)), ("kernel", (32, 4)), ("bias", (4,))]


class Restorations:
    """Shards of one job, restored with another key at every ``start``, and the clients of its workers."""

    def __init__(self, *, shards=2, overlap=0, codec="identity", tables=()):
        self.reference = Reference(keras.optimizers.SGD(0.1), layout=ParameterLayout.of(SHAPES))
        self.algorithm = rule_spec("plain", overlap=overlap, codec=codec)
        self.shards, self.overlap, self.tables = shards, overlap, tables
        self.choice = make_choice(self.algorithm, self.reference.layout.size)
        self.stopped, self.searching = threading.Event(), threading.Event()
        self.patience_s = NEVER_S
        self.moves, self.running, self.clients, self.incarnation = ShardMoves(), [], [], -1

    @property
    def size(self):
        return self.reference.layout.size

    def start(self, name="w"):
        """Start all shards anew and return the announcement."""
        self.incarnation += 1
        token = f"key-{self.incarnation}"
        manifest = self.reference.manifest().replaced(tables=list(self.tables))
        state = State(self.reference.weights, self.reference.state)
        arguments = (manifest, state, self.algorithm)
        new = [
            start_shard(*arguments, i, self.shards, workers=2, token=token, leased=False) for i in range(self.shards)
        ]
        self.running.append(new)
        return ins.MoveShards("job", self.incarnation, tuple(s.address for s in new), worker_token(token, name))

    def kill(self):
        for shard in self.running[-1]:
            shard.stop(0)

    def client(self):
        self.moves.announce(self.start())
        self.clients.append(MovableClient(self.moves, self._connect, self._patience))
        return self.clients[-1]

    def _patience(self):
        searching = self.searching

        class Watched(Patience):
            def failure(self, since=None):
                searching.set()
                return super().failure(since)

        return Watched(self.patience_s, self.stopped)

    def _connect(self, place):
        return StreamClient(
            place.shards,
            self.reference.manifest().layout,
            "w",
            place.shard_token,
            timeout_s=NEVER_S,
            overlap=self.overlap,
            choice=self.choice,
            tables=self.tables,
            patience=self._patience(),
        )

    @property
    def versions(self):
        return [shard.store.version for shard in self.running[-1]]

    def stop(self):
        self.stopped.set()
        for client in self.clients:
            client.close()
        for shards in self.running:
            for shard in shards:
                shard.stop(0)


@pytest.fixture
def make():
    made = []

    def make(**options):
        made.append(Restorations(**options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def announce_while_blocked(job):
    """Restore the shards, and announce it on another thread once an exchange looks for the old ones."""

    def run():
        assert job.searching.wait(HANGS_S)
        job.moves.announce(job.start())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def answers_to(client, many):
    """Push gradients, all before the first reply, and return the replies."""
    return [pending.result() for pending in [client.begin_push(gradient, samples=1) for gradient in many]]


@pytest.mark.parametrize(("shards", "overlap"), [(1, 0), (2, 0), (2, 2)])
def test_a_blocked_push_ends_with_the_announcement_and_goes_on_elsewhere(make, shards, overlap):
    job = make(shards=shards, overlap=overlap)
    client = job.client()
    pulled, many = client.pull(), gradients(4, layout=job.reference.layout)
    client.push(many[0], samples=1)
    job.kill()
    restorer = announce_while_blocked(job)
    with pytest.raises(ShardsMoved):  # in the send, or in the wait for the reply
        answers_to(client, many[1 : 2 + overlap])
    restorer.join(HANGS_S)
    assert client.announced
    assert client.incarnation == 0
    client.move()
    assert (client.announced, client.incarnation) == (False, 1)
    again = client.pull()
    assert (again.sequence, again.versions) == (pulled.sequence, (0,) * shards)
    assert np.array_equal(again.weights, job.reference.weights)
    answers = answers_to(client, many[: 1 + overlap])
    assert [(a.applied, a.sequence, a.versions) for a in answers] == [
        (True, 2 + i, (1 + i,) * shards) for i in range(1 + overlap)
    ]


def test_before_the_move_every_exchange_ends_at_once(make):
    job = make()
    client = job.client()
    client.pull()
    job.moves.announce(job.start())
    for exchange in (client.pull, lambda: client.push(gradients(1, layout=job.reference.layout)[0], samples=1)):
        with pytest.raises(ShardsMoved):
            exchange()
    assert job.versions == [0, 0]


def test_a_move_happens_once_and_never_back(make):
    job = make()
    client = job.client()
    first = job.moves.newest
    second = job.start()
    for move in (second, second, first):
        client.announce(move)
        client.move()
        assert client.incarnation == 1
    gradient = gradients(1, layout=job.reference.layout)[0]
    client.pull()
    client.push(gradient, samples=1)
    client.announce(first)
    client.move()
    assert client.push(gradient, samples=1).versions == (2, 2)


def test_the_newest_of_several_announcements_counts(make):
    job = make()
    client = job.client()
    for move in (job.start(), job.start()):
        job.moves.announce(move)
    client.move()
    assert client.incarnation == 2
    assert client.pull().versions == (0, 0)


def test_an_announcement_during_the_move_interrupts_the_new_client(make):
    job = make()
    client = job.client()
    moves = [job.start(), job.start()]
    connect = client._connect

    def announce_and_connect(place):
        job.moves.announce(moves.pop())
        return connect(place)

    client.announce(moves.pop(0))
    client._connect = announce_and_connect
    client.move()
    assert (client.incarnation, client.announced) == (1, True)
    with pytest.raises(ShardsMoved):
        client.pull()


@pytest.mark.parametrize("codec", ["identity", "int8", "adaptive"])
def test_bytes_and_codecs_are_counted_over_a_move(make, codec):
    job = make(codec=codec)
    client = job.client()
    many = gradients(5, layout=job.reference.layout)
    client.pull(exact=False)
    for g in many[:3]:
        client.push(g, samples=1)
    job.kill()
    sent, received, codecs = client.bytes_sent, client.bytes_received, client.codecs
    job.moves.announce(job.start())
    client.move()
    assert (client.bytes_sent, client.bytes_received) == (sent, received)
    for direction in ("push", "reply"):
        assert client.codecs.get(direction) == codecs.get(direction)
    client.pull(exact=False)
    for g in many[3:]:
        client.push(g, samples=1)
    assert client.bytes_sent > sent
    assert client.bytes_received > received
    if codec != "identity":
        assert sum(use["messages"] for use in client.codecs["push"].values()) == 5
        assert sum(use["messages"] for use in client.codecs["reply"].values()) == 7


def test_a_worker_with_tables_gets_whole_weights_after_a_move(make):
    job = make(tables=(0,))
    client = job.client()
    client.pull(exact=False)
    gradient = np.zeros(job.size, np.float32)
    gradient[:32] = 1.0
    assert isinstance(client.push(gradient, samples=1).weights, RowWeights)
    job.kill()
    job.moves.announce(job.start())
    client.move()
    again = client.pull(exact=False).weights
    assert np.array_equal(np.asarray(again), job.reference.weights)
    answer = client.push(gradient, samples=1)
    assert (answer.applied, answer.versions) == (True, (1, 1))
    assert isinstance(answer.weights, RowWeights)


def test_after_a_refused_token_a_client_waits_for_the_announcement(make):
    """A newer incarnation may serve at the old address."""
    job = make(shards=1)
    client = job.client()
    restored = job.start()
    client._client = job._connect(ins.MoveShards("job", 0, restored.shards, job.moves.newest.shard_token))
    thread = threading.Thread(target=lambda: job.searching.wait(HANGS_S) and job.moves.announce(restored))
    thread.start()
    with pytest.raises(ShardsMoved) as found:
        client.pull()
    thread.join()
    assert isinstance(found.value.__cause__, AuthenticationFailed)
    client.move()
    assert client.pull().versions == (0,)


def test_a_refused_token_without_an_announcement_is_an_error(make):
    job = make(shards=1)
    client = job.client()
    client._client = job._connect(ins.MoveShards("job", 0, job.start().shards, job.moves.newest.shard_token))
    job.patience_s = 0.0
    with pytest.raises(AuthenticationFailed):
        client.pull()


def test_an_error_without_an_announcement_stays_what_it_is(make):
    client = make().client()
    with pytest.raises(ShapeMismatch):
        client.begin_push(np.zeros(3, np.float32), samples=1)


def test_there_are_no_shards_before_the_first_announcement():
    with pytest.raises(LookupError, match="announcement"):
        _ = ShardMoves().newest
