"""A worker that requests its next lease while it computes the last task of the present one."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from tests.support.scripted_worker import Job

ONES = np.ones((8, 1), np.float32)
WAIT = pb.NextReply(wait=pb.Wait())


def lease(*tasks, **options):
    return pb.NextReply(work=pb.Work(tasks=[pb.Task(task=t, start=t, stop=t + 1, parts=1) for t in tasks], **options))


def finished(reports):
    return [[done.task for done in report.finished] for report in reports]


def flying(reports):
    return [sorted(report.in_flight) for report in reports]


def test_the_next_lease_is_requested_with_the_last_task_in_flight():
    job = Job(ONES)
    reports = job.run(job.begin(), lease(0, 1, look_ahead=True), lease(2, 3, look_ahead=True), lease(4))
    assert finished(reports) == [[], [0], [1, 2], [3, 4]]
    assert flying(reports) == [[], [1], [3], []]
    assert len(job.shards.pushes) == 5


def test_every_task_is_reported_once_with_its_time():
    job = Job(ONES)
    reports = job.run(job.begin(), lease(0, look_ahead=True), lease(1, look_ahead=True), lease(2), WAIT)
    done = [one for report in reports for one in report.finished]
    assert [one.task for one in done] == [0, 1, 2]
    assert all(one.compute_s > 0 for one in done)


def test_pushes_in_flight_are_named_beside_the_task_that_is_computed():
    job = Job(ONES, overlap=1)
    reports = job.run(job.begin(), lease(0, 1, overlap=1, look_ahead=True), lease(2, overlap=1), WAIT)
    assert flying(reports)[1] == [0, 1]
    assert [task for tasks in finished(reports) for task in tasks][:2] == [0, 1]


def test_an_answer_without_work_is_asked_for_again_when_the_task_is_finished():
    job = Job(ONES)
    reports = job.run(job.begin(), lease(0, look_ahead=True), WAIT, lease(1))
    assert finished(reports) == [[], [], [0], [1]]
    assert flying(reports) == [[], [0], [], []]


def test_a_worker_that_ends_reports_its_step_and_begins_nothing_that_it_was_leased_ahead():
    job = Job(ONES)
    reports = job.run(job.begin(), lease(0, look_ahead=True), job.ending.set, lease(1), lease(1))
    assert finished(reports) == [[], [], [0]]
    assert len(job.shards.pushes) == 1


def test_an_error_of_the_call_is_raised_when_its_answer_is_taken():
    def refuse():
        raise ProtocolError("refused")

    job = Job(ONES)
    with pytest.raises(ProtocolError, match="refused"):
        job.run(job.begin(), lease(0, look_ahead=True), refuse)
    assert len(job.shards.pushes) == 1
