import pytest

from nfdt.core.errors import JobFailed, ProtocolError
from nfdt.core.jobs.feed import Batch, FeedQueue


def batch(step: int, epoch: int = 0) -> Batch:
    return Batch(epoch, step, 4, b"data")


@pytest.fixture
def queue():
    queue = FeedQueue()
    queue.begin(0, capacity=2)
    return queue


def test_the_epochs_capacity_is_granted_at_once(queue):
    assert queue.grant(0) == (0, 2)
    assert queue.grant(0) is None


def test_a_taken_batch_grants_another(queue):
    queue.grant(0)
    queue.offer(batch(0))
    assert queue.take() == batch(0)
    assert queue.grant(0) == (0, 1)


def test_a_batch_without_credit_is_refused(queue):
    with pytest.raises(ProtocolError, match="credit"):
        queue.offer(batch(0))


def test_a_late_batch_of_another_epoch_is_dropped(queue):
    queue.begin(1, capacity=2)
    queue.offer(batch(5, epoch=0))
    assert queue.take() is None


def test_an_epoch_is_exhausted_when_its_last_batch_is_taken(queue):
    queue.grant(0)
    queue.offer(batch(0))
    queue.end(0)
    assert not queue.exhausted
    queue.take()
    assert queue.exhausted


def test_an_iterator_that_raises_fails_the_job(queue):
    queue.end(0, "ValueError: broken row")
    with pytest.raises(JobFailed, match="broken row"):
        queue.take()


def test_a_closed_queue_grants_nothing(queue):
    queue.close()
    assert queue.grant(0) is None
