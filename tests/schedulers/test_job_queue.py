"""Order of waiting jobs of several owners."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.job_queue import QueuedJob, Quota, expected_starts, fair_order


def jobs(*rows):
    return [QueuedJob(f"job-{number}", *row) for number, row in enumerate(rows)]


def order(waiting, running=()):
    return [int(job.job_id.removeprefix("job-")) for job in fair_order(waiting, running)]


def test_jobs_of_one_owner_start_in_the_order_of_their_submission():
    assert order(jobs(("a", 2), ("a", 9), ("a", 1))) == [0, 1, 2]


def test_an_owner_orders_its_own_jobs_by_priority_and_passes_no_other():
    assert order(jobs(("a", 1), ("a", 1, 5), ("b", 1), ("a", 1, -1))) == [1, 2, 0, 3]


def test_many_jobs_of_one_owner_do_not_hold_up_another():
    assert order(jobs(*[("a", 4)] * 5, ("b", 4))) == [0, 5, 1, 2, 3, 4]


def test_who_runs_fewer_workers_is_next():
    running = [QueuedJob("x", "a", 8), QueuedJob("y", "b", 2)]
    assert order(jobs(("a", 1), ("b", 2), ("b", 3), ("b", 3), ("b", 1)), running) == [1, 2, 3, 0, 4]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(-2, 2))),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9))),
)
def test_every_job_is_there_once_and_the_first_is_of_the_owner_with_the_fewest_workers(waiting, running):
    waiting, running = jobs(*waiting), [QueuedJob("x", *row) for row in running]
    found = fair_order(waiting, running)
    assert sorted(found, key=str) == sorted(waiting, key=str)
    for owner in "abc":
        own = [job for job in found if job.owner == owner]
        assert own == sorted(own, key=lambda job: (-job.priority, waiting.index(job)))
    if found:
        workers = Counter({job.owner: 0 for job in waiting})
        for job in running:
            workers[job.owner] += job.workers
        assert workers[found[0].owner] == min(workers[job.owner] for job in waiting)


@pytest.mark.parametrize(
    ("quota", "admits"),
    [
        (Quota(), True),
        (Quota(jobs=2), False),
        (Quota(jobs=3), True),
        (Quota(workers=9), False),
        (Quota(workers=10), True),
    ],
)
def test_a_quota_counts_the_running_jobs_of_its_owner(quota, admits):
    running = [QueuedJob("x", "a", 3), QueuedJob("y", "a", 3), QueuedJob("z", "b", 50)]
    assert quota.admits(QueuedJob("job", "a", 4), running) == admits


def test_a_quota_is_described():
    assert str(Quota(jobs=2, workers=8)) == "The quota is 2 jobs and 8 workers at a time"


def test_jobs_start_when_running_ones_have_ended_and_later_ones_are_unknown():
    starts = expected_starts(jobs(("a", 2), ("a", 4), ("b", 4), ("b", 1)), free=2, ends=[(60.0, 3), (10.0, 2)])
    assert starts == {"job-0": 0.0, "job-1": 60.0, "job-2": None, "job-3": None}
