import pytest

from nfdt.core.errors import JobFailed, ProtocolError
from nfdt.core.jobs.feed import FeedQueue, StreamedBatch


def batch(step: int, epoch: int = 0) -> StreamedBatch:
    return StreamedBatch(epoch, step, 4, b"data")


@pytest.fixture
def queue():
    queue = FeedQueue()
    queue.allow(0, 2)
    return queue


def test_what_is_allowed_is_granted_once(queue):
    assert queue.grant(0) == (0, 2)
    assert queue.grant(0) is None
    queue.allow(0, 3)
    assert queue.grant(0) == (0, 1)


def test_batches_come_out_in_order(queue):
    queue.grant(0)
    queue.offer(batch(0))
    queue.offer(batch(1))
    assert [queue.take(), queue.take(), queue.take()] == [batch(0), batch(1), None]


def test_a_batch_without_credit_is_refused(queue):
    with pytest.raises(ProtocolError, match="credit"):
        queue.offer(batch(0))


def test_a_late_batch_of_another_epoch_is_dropped(queue):
    queue.allow(1, 2)
    queue.offer(batch(5, epoch=0))
    assert queue.take() is None


def test_another_epoch_drops_what_is_left_of_the_last_one(queue):
    queue.grant(0)
    queue.offer(batch(0))
    queue.allow(1, 2)
    assert queue.take() is None


def test_an_epoch_is_exhausted_when_its_last_batch_is_taken(queue):
    queue.grant(0)
    queue.offer(batch(0))
    queue.end(0)
    assert not queue.exhausted(0)
    queue.take()
    assert queue.exhausted(0)
    assert not queue.exhausted(1)


def test_an_iterator_that_raises_fails_the_job(queue):
    queue.end(0, "ValueError: broken row")
    with pytest.raises(JobFailed, match="broken row"):
        queue.take()


def test_a_closed_queue_grants_nothing(queue):
    queue.close()
    assert queue.grant(0) is None


def test_the_run_is_notified_of_everything_that_arrives():
    calls = []
    queue = FeedQueue(news=lambda: calls.append(1))
    queue.allow(0, 1)
    queue.grant(0)
    queue.offer(batch(0))
    queue.end(0)
    assert len(calls) == 2
