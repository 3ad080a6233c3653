"""Batches of a client: credits are announced once, batches reach the coordinator in order, nothing is queued twice."""

import threading
from types import SimpleNamespace

import pytest

from nfdt.core.clock import SystemClock
from nfdt.core.errors import JobFailed, ProtocolError
from nfdt.core.jobs.feed import StreamedBatch
from nfdt.jobserver.client_requests import ClientFeed
from nfdt.jobserver.mailbox import Mailbox
from tests.support.simulated_cluster import SimulatedCluster, job

CREDIT = 6  # of two workers: two batches each, and two more


def batch(step: int, epoch: int = 0) -> StreamedBatch:
    return StreamedBatch(epoch, step, 4, bytes([step]))


class Fed:
    """A feed in front of a real coordinator with two workers."""

    def __init__(self, epochs=1):
        self.cluster = SimulatedCluster(job(stream=True, interactive=False, epochs=epochs))
        self.mailbox = Mailbox(SystemClock())
        self.state = SimpleNamespace(mailbox=self.mailbox, training=None, ended=False)
        self.begin()
        self.feed = ClientFeed(self.state)
        self.cluster.join(2)
        self.client = self.feed.open()

    def begin(self):
        self.state.training = SimpleNamespace(coordinator=self.cluster.coordinator)

    def offer(self, batch):
        self.feed.offer(self.client, batch)

    def trained(self):
        """Let the workers train until they wait; return the data of the epochs that have ended."""
        for _ in range(20):
            for name in list(self.cluster.workers):
                self.cluster.turn(name)
            self.cluster.flush()
        return self.cluster.of("epoch_end")


def granted(fed: Fed) -> tuple[int, int]:
    credit = fed.feed.grant(0)
    return credit.epoch, credit.batches


@pytest.fixture
def fed() -> Fed:
    return Fed()


def test_credit_is_announced_once(fed):
    assert granted(fed) == (0, CREDIT)
    assert fed.feed.grant(0) is None


def test_credit_grows_as_workers_take_batches(fed):
    fed.feed.grant(0)
    fed.offer(batch(0))
    assert fed.feed.grant(0) is None
    fed.trained()
    assert granted(fed) == (0, 1)


def test_batches_reach_the_workers_in_order_and_the_epoch_ends_with_the_last(fed):
    fed.feed.grant(0)
    for step in range(3):
        fed.offer(batch(step))
    assert fed.trained() == []
    fed.feed.end(0)
    (end,) = fed.trained()
    assert (end["steps"], end["epoch"]) == (3, 0)


def test_a_batch_without_credit_is_refused(fed):
    for step in range(CREDIT):
        fed.offer(batch(step))
    with pytest.raises(ProtocolError, match="credit"):
        fed.offer(batch(CREDIT))


def test_another_client_passes_over_the_batches_that_the_job_has_and_gets_the_credit_that_is_left(fed):
    fed.feed.grant(0)
    for step in range(2):
        fed.offer(batch(step))
    fed.client = fed.feed.open()
    credit = fed.feed.grant(0)
    assert (credit.batches, credit.accepted) == (CREDIT - 2, 2)


def test_a_late_batch_of_another_epoch_is_dropped(fed):
    fed.feed.grant(0)
    fed.offer(batch(0, epoch=7))
    assert fed.cluster.coordinator.feed_credit.free == CREDIT


def test_the_next_epoch_has_credit_of_its_own():
    fed = Fed(epochs=2)
    assert granted(fed) == (0, CREDIT)
    fed.offer(batch(0))
    fed.feed.end(0)
    fed.trained()
    assert granted(fed) == (1, CREDIT)


def test_an_iterator_that_raises_fails_the_job(fed):
    fed.feed.end(0, "ValueError: broken row")
    with pytest.raises(JobFailed, match="broken row"):
        fed.mailbox.check()


def test_before_training_nothing_is_granted_and_batches_are_dropped(fed):
    fed.state.training = None
    assert fed.feed.grant(0) is None
    fed.offer(batch(0))
    fed.feed.end(0)
    fed.begin()
    assert granted(fed) == (0, CREDIT)


def test_a_job_that_has_ended_grants_nothing(fed):
    assert not fed.feed.closed
    fed.state.ended = True
    assert fed.feed.closed
    assert fed.feed.grant(60) is None
    fed.offer(batch(0))


def test_a_waiting_client_is_granted_credit_when_training_begins(fed):
    fed.state.training = None
    granted = []
    waiting = threading.Thread(target=lambda: granted.append(fed.feed.grant(60)), daemon=True)
    waiting.start()
    fed.mailbox.handle(fed.begin)
    waiting.join(60)
    assert [credit.batches for credit in granted] == [CREDIT]


# ---- room by bytes


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr("nfdt.coordinator.stream_feed.MOST_BYTES", 10)


def large(step: int, size: int = 6) -> StreamedBatch:
    return StreamedBatch(0, step, 4, bytes(size))


def waiting(fed: Fed, size: int) -> threading.Thread:
    """Wait for room in a thread, which has begun to wait when this returns."""
    asked = threading.Event()
    has_room = fed.cluster.coordinator.has_room

    def ask(epoch, size):
        asked.set()
        return has_room(epoch, size)

    fed.cluster.coordinator.has_room = ask
    thread = threading.Thread(target=fed.feed.await_room, args=(fed.client, 0, size))
    thread.start()
    assert asked.wait(60)
    return thread


def test_one_batch_always_has_room_and_another_when_both_fit(fed, narrow):
    coordinator = fed.cluster.coordinator
    assert coordinator.has_room(0, 1000)
    fed.offer(large(0))
    assert coordinator.has_room(0, 4)
    assert not coordinator.has_room(0, 5)
    assert coordinator.has_room(1, 5)  # of an epoch that is over: it is dropped


def test_the_server_reads_no_further_until_workers_have_trained(fed, narrow):
    fed.offer(large(0))
    thread = waiting(fed, 6)
    assert thread.is_alive()
    fed.trained()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["the job ends", "another client comes"])
def test_nobody_waits_for_room_in_vain(end, fed, narrow):
    fed.offer(large(0))
    thread = waiting(fed, 6)
    if end == "the job ends":
        fed.state.ended = True
    else:
        fed.feed.open()
        fed.offer(large(1))
        assert fed.cluster.coordinator.feed_credit.total == CREDIT  # it was another client's, and is dropped
    thread.join(60)
    assert not thread.is_alive()


def test_without_room_for_long_a_batch_is_taken_all_the_same(fed, narrow, monkeypatch):
    monkeypatch.setattr("nfdt.jobserver.client_requests.FULL_S", 0.0)
    fed.offer(large(0))
    fed.feed.await_room(fed.client, 0, 6)
    assert not fed.cluster.coordinator.has_room(0, 6)
