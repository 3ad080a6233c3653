"""The rate of events about all workers of a job."""

import pytest

from nfdt.coordinator.progress import MANY, RunningLogs, Throttle


@pytest.mark.parametrize(("workers", "interval_s"), [(1, 1.0), (MANY, 1.0), (4 * MANY, 4.0)])
def test_events_about_more_workers_are_rarer_in_proportion(workers, interval_s):
    throttle = Throttle(1.0)
    assert throttle.is_due(0.0, workers)
    assert not throttle.is_due(0.99 * interval_s, workers)
    assert throttle.is_due(interval_s, workers)
    assert not throttle.is_due(1.99 * interval_s, workers)


def test_logs_count_the_workers_that_have_samples():
    logs = RunningLogs()
    for worker in ("a", "b", "a"):
        logs.add(worker, 2, {"loss": 1.0})
    assert len(logs) == 2
    assert logs.mean() == {"loss": 1.0}
