"""Calls to shards that do not answer: repeated with the same shards, and with their successors."""

from __future__ import annotations

import pytest

from nfdt.core.errors import ServerUnreachable
from nfdt.jobserver.topologies import failover
from nfdt.jobserver.topologies.failover import MovingShards

DEADLINE_S = 60.0


class Shards:
    """Client of shards that do not answer the first calls, and may be replaced after them.

    Attributes:
        received: What was set or written.
    """

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls = 0
        self.moving: MovingShards | None = None
        self.successors: Shards | None = None
        self.received: list[object] = []
        self.closed = False

    def set_learning_rate(self, value: object) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            if self.successors is not None:
                self.moving.replace(self.successors)
            raise ServerUnreachable("Connection refused.")
        self.received.append(value)

    write = set_learning_rate

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def client(shards: Shards, deadline_s: float = DEADLINE_S) -> MovingShards:
    shards.moving = MovingShards(shards, deadline_s, "shard")
    return shards.moving


def test_a_call_is_repeated_with_shards_that_answer_later(monkeypatch):
    monkeypatch.setattr(failover, "RETRY_S", 0.0)
    shards = Shards(failures=3)
    client(shards).set_learning_rate(0.1)
    assert shards.calls == 4


def test_a_call_is_repeated_with_successors():
    lost, successors = Shards(failures=1), Shards()
    lost.successors = successors
    client(lost).set_learning_rate(0.1)
    assert (lost.calls, successors.calls) == (1, 1)


def test_a_call_that_is_never_answered_fails_after_its_deadline(monkeypatch):
    monkeypatch.setattr(failover, "RETRY_S", 0.0)
    with pytest.raises(ServerUnreachable, match="No shard answers"):
        client(Shards(failures=10**9), deadline_s=0.01).set_learning_rate(0.1)


def test_a_client_that_was_closed_repeats_nothing():
    shards = Shards(failures=10**9)
    moving = client(shards)
    moving.close()
    with pytest.raises(ServerUnreachable, match="No shard answers"):
        moving.set_learning_rate(0.1)
    assert shards.calls == 0


def test_clients_of_lost_shards_are_closed_in_the_end():
    first = Shards()
    moving = client(first)
    moving.replace(Shards())
    moving.close()
    assert first.closed


@pytest.mark.parametrize(
    ("repeats_writes", "fresh", "repeated"),
    [(True, True, [0.5, "new"]), (True, False, [0.5]), (False, True, [0.5])],
)
def test_successors_get_the_learning_rate_and_what_they_cannot_have(repeats_writes, fresh, repeated):
    moving = MovingShards(Shards(), DEADLINE_S, "shard", repeats_writes=repeats_writes)
    moving.write("old")
    moving.flush()
    moving.set_learning_rate(0.5)
    moving.write("new")
    following = Shards()
    moving.repeat(following, fresh=fresh)
    assert following.received == repeated


def test_what_an_epoch_began_with_is_not_repeated_after_its_end():
    moving = MovingShards(Shards(), DEADLINE_S, "rank", repeats_writes=True)
    moving.write("old")
    moving.flush()
    following = Shards()
    moving.repeat(following, fresh=True)
    assert following.received == []
