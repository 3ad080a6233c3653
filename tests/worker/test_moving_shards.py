"""A worker whose shards are restored elsewhere: what it drops, what it keeps, and what it reports afterwards."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.job_token import worker_token
from nfdt.core.work.messages import to_reply
from nfdt.core.work.slot_connection import Patience
from nfdt.model.program.state import load_state
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.scripted_worker import CODED, Job, Shards, evaluate, loss_of, move, work

HANGS_S = 120.0
NEVER_S = 3600.0
ONES = np.ones((4, 1), np.float32)
WAIT = pb.NextReply(wait=pb.Wait())


class MovedJob(Job):
    """Job whose shards are other fakes after each move; ``before`` are the earlier ones."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.before = []

    def connect(self, place):
        if place.incarnation:
            self.before.append(self.shards)
            self.shards = Shards(self.manifest.layout.size)
        return self.shards


@pytest.fixture(autouse=True)
def fakes_that_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(Shards, "interrupt", lambda self: None, raising=False)
    monkeypatch.setattr(Shards, "close", lambda self: None, raising=False)


def moved_to(incarnation):
    return to_reply(move(incarnation))


def finished(report):
    return [done.task for done in report.finished]


def test_the_answer_to_a_report_moves_the_worker_and_its_next_report_is_empty():
    job = MovedJob(ONES)
    reports = job.run(job.begin(), work(0), moved_to(1), work(0), work(1), WAIT)
    assert [finished(report) for report in reports] == [[], [0], [], [0], [1], []]
    assert [report.incarnation for report in reports] == [0, 0, 1, 1, 1, 1]
    assert job.computed_on == [CODED, 1.0]  # pulled from the new shards
    assert [len(shards.pushes) for shards in job.before] == [1]


def test_what_is_announced_before_a_report_is_dropped_from_it():
    job = MovedJob(ONES)
    push = job.shards.begin_push

    def push_and_announce(gradient, **options):
        job.moves.announce(move(1))
        return push(gradient, **options)

    job.shards.begin_push = push_and_announce
    reports = job.run(job.begin(), work(0), work(0), WAIT)
    assert [finished(report) for report in reports] == [[], [], [0], []]
    assert [report.incarnation for report in reports] == [0, 1, 1, 1]


def test_pushes_in_flight_are_forgotten_with_their_shards():
    job = MovedJob(ONES, overlap=2)
    reports = job.run(job.begin(), work(0, overlap=2), work(1, overlap=2), moved_to(1), work(0, overlap=2), WAIT, WAIT)
    assert [list(report.in_flight) for report in reports] == [[], [0], [1], [], [0], [], []]
    assert [finished(report) for report in reports] == [[], [], [0], [], [], [0], []]


def test_an_epoch_that_begins_meanwhile_begins():
    job = MovedJob(ONES)
    reports = job.run(lambda: job.moves.announce(move(1)), job.begin(3), work(0, epoch=3), WAIT)
    assert [(report.epoch, report.incarnation) for report in reports] == [(3, 1)] * 3


def test_an_evaluation_whose_result_does_not_count_ends():
    job = MovedJob(ONES, timeout_s=1e-6)
    pull = job.shards.pull

    def pull_and_announce(*arguments, **options):
        job.moves.announce(move(1))
        return pull(*arguments, **options)

    job.shards.pull = pull_and_announce
    reports = job.run(job.begin(), evaluate(tasks=3), evaluate(tasks=3))
    assert [(r.busy, r.HasField("evaluated"), r.incarnation) for r in reports] == [
        (False, False, 0),
        (True, False, 0),
        (False, False, 1),
        (True, False, 1),
        (True, False, 1),
        (True, False, 1),
        (False, True, 1),
    ]


def test_a_validation_of_the_same_epoch_is_on_the_weights_of_the_new_shards():
    job = MovedJob(ONES)
    reports = job.run(job.begin(), work(0), evaluate(), moved_to(1), evaluate())
    assert [loss_of(report) for report in reports if report.HasField("evaluated")] == [1.0, 0.0]


def test_statistics_and_the_logs_of_the_epoch_stay():
    job = MovedJob(ONES)
    reports = job.run(job.begin(), work(0), work(1), moved_to(1), work(0), WAIT)
    assert [json.loads(report.statistics_json)["steps"] for report in reports] == [0, 1, 2, 2, 3, 3]
    assert reports[3].logs == reports[2].logs
    assert reports[3].logs


class RealShards(Job):
    """Job with real shards of the worker; :meth:`start` starts all of them again with another key."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.running, self.clients = [], []
        self.searching = threading.Event()

    def start(self):
        key = f"key-{len(self.running)}"
        arguments = (self.manifest, load_state(self.blobs[self.manifest.state]), self.spec.algorithm)
        self.running.append(start_shard(*arguments, 0, 1, workers=1, token=key, leased=False))
        return move(len(self.running), self.running[-1].address, token=worker_token(key, "worker-0"))

    def connect(self, place):
        searching = self.searching

        class Watched(Patience):
            def failure(self, since=None):
                searching.set()
                return super().failure(since)

        self.clients.append(
            StreamClient(
                place.shards,
                self.manifest.layout,
                "worker-0",
                place.shard_token,
                timeout_s=NEVER_S,
                patience=Watched(NEVER_S, self.stopped),
                overlap=self.spec.algorithm.overlap,
            )
        )
        return self.clients[-1]

    def die(self):
        self.running[-1].stop(0)

    def restore(self):
        """Restore the shards once the worker looks for the old ones."""
        assert self.searching.wait(HANGS_S)
        self.moves.announce(self.start())

    def close(self):
        self.stopped.set()
        for one in self.clients:
            one.close()
        for one in self.running:
            one.stop(0)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_worker_in_the_middle_of_a_push_goes_on_with_the_restored_shards(overlap):
    job = RealShards(ONES, overlap=overlap)
    job.moves.announce(job.start())
    restorer = threading.Thread(target=job.restore)

    def die():
        job.die()
        restorer.start()

    many = [work(task, overlap=overlap) for task in range(1, 4)]
    again = [work(task, overlap=overlap) for task in range(4)]
    try:
        reports = job.run(job.begin(), work(0, overlap=overlap), WAIT, die, *many, *again, WAIT, WAIT, WAIT, WAIT)
    finally:
        restorer.join(HANGS_S)
        job.close()
    first = next(at for at, report in enumerate(reports) if report.incarnation == 2)
    lost, kept = reports[:first], reports[first:]
    assert {report.incarnation for report in lost} == {1}
    assert [task for report in lost for task in finished(report)] == [0]
    assert not kept[0].finished
    assert not kept[0].in_flight
    redone = [done for report in kept for done in report.finished]
    assert job.running[-1].store.version == len({done.task for done in redone})  # a repeated task is applied once
    assert [done.task for done in redone] == [1, 2, 3, 0, 1, 2, 3][-len(redone) :]
    sent = [json.loads(report.statistics_json)["bytes_sent"] for report in reports]
    assert sent == sorted(sent)
