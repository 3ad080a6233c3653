"""A worker whose process is asked to end: it finishes its step, reports it, and begins nothing more."""

from __future__ import annotations

import numpy as np

from nfdt.core.wire import workers_pb2 as pb
from tests.support.scripted_worker import Job, evaluate, move, work

ONES = np.ones((8, 1), np.float32)
COLLECT = pb.NextReply(collect_state=pb.CollectState(epoch=0))
MOVE = pb.NextReply(move_shards=pb.MoveShards(job_id="job", incarnation=1))


class EndingJob(Job):
    """Job whose process is asked to end during its push number ``during``, from 0 on."""

    def __init__(self, during, **options):
        super().__init__(ONES, **options)
        push = self.shards.begin_push

        def push_and_end(gradient, **fields):
            if len(self.shards.pushes) == during:
                self.ending.set()
            return push(gradient, **fields)

        self.shards.begin_push = push_and_end
        self.shards.interrupt = self.shards.close = lambda: None


def lease(*tasks, **options):
    return pb.NextReply(work=pb.Work(tasks=[pb.Task(task=t, start=t, stop=t + 1, parts=1) for t in tasks], **options))


def finished(reports):
    return [[done.task for done in report.finished] for report in reports]


def test_the_step_that_has_begun_is_the_last():
    job = EndingJob(during=1)
    reports = job.run(job.begin(), lease(0, 1, 2, 3), lease(2, 3))
    assert finished(reports) == [[], [0, 1]]
    assert len(job.shards.pushes) == 2


def test_pushes_in_flight_are_reported_before_the_worker_leaves():
    job = EndingJob(during=3, overlap=2)
    reports = job.run(job.begin(), lease(0, 1, 2, 3, 4, overlap=2), lease(4), lease(4))
    assert sorted(task for tasks in finished(reports) for task in tasks) == [0, 1, 2, 3]
    assert not reports[-1].in_flight
    assert len(job.shards.pushes) == 4


def test_an_idle_worker_leaves_at_the_next_answer():
    job = EndingJob(during=-1)
    reports = job.run(job.begin(), job.ending.set, lease(0))
    assert finished(reports) == [[]]
    assert job.shards.pushes == []


def test_the_state_of_the_epoch_is_sent_before_the_worker_leaves():
    job = EndingJob(during=0)
    reports = job.run(job.begin(), lease(0, 1), COLLECT, lease(1))
    assert finished(reports) == [[], [0], []]
    assert reports[-1].epoch_state.steps == 1


def test_a_leaving_worker_reports_nothing_of_shards_that_are_gone():
    job = EndingJob(during=0)
    reports = job.run(job.begin(), lease(0, 1), MOVE, lease(0))
    assert [report.incarnation for report in reports] == [0, 0, 1]
    assert finished(reports) == [[], [0], []]


def test_a_leaving_worker_evaluates_nothing():
    job = EndingJob(during=0)
    reports = job.run(job.begin(), work(0), evaluate())
    assert not any(report.HasField("evaluated") for report in reports)


def test_a_worker_that_moves_while_it_leaves_drops_its_pushes_in_flight():
    job = EndingJob(during=1, overlap=2)
    reports = job.run(job.begin(), lease(0, 1, 2, overlap=2), lambda: job.moves.announce(move(1)), lease(2), lease(2))
    assert [report.incarnation for report in reports] == [0, 0, 1]
    assert not reports[-1].in_flight
