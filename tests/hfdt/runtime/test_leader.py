"""What a leader lets its ranks do, and what it tells the server, from the first assignment to the last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("horovod")

from hfdt.runtime import leader as leaders
from hfdt.runtime.elastic.rank import ElasticLeader
from hfdt.runtime.leader import GroupLeader, Leader
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins

JOB = {"job_id": "job-1", "spec_json": "{}"}
SHARD = pb.Assignment(shard=pb.ShardAssignment(**JOB))
WORKER = pb.Assignment(worker=pb.WorkerAssignment(worker="worker-0", **JOB))
DISMISS = pb.Assignment(dismiss=pb.Dismiss())
EVALUATE = pb.NextReply(evaluate=pb.Evaluate(epoch=0))
LEAVE = pb.NextReply(leave=pb.Leave(reason="done"))
DONE = ins.Report(finished=(3,))


class Interrupted(Exception):
    """The ranks have changed."""


class FakeRing:
    """Ring that records its commands; the numbers in ``interrupted`` are those of commands that do not end."""

    def __init__(self, interrupted=()):
        self.kinds, self._interrupted = [], interrupted
        self.job_id, self.job = "", None
        self.communicator, self.resets, self.pending = SimpleNamespace(size=2), 0, ins.Report()

    def statistics(self):
        return {}

    def broadcast(self, command):
        self.kinds.append(command.kind)
        if len(self.kinds) in self._interrupted:
            raise Interrupted
        if command.kind == "job":
            step, exchange = SimpleNamespace(layout=None), SimpleNamespace()
            self.job_id = command.values["id"]
            self.job = SimpleNamespace(
                step=step, exchange=exchange, steps=1, spec=SimpleNamespace(busy_report_s=1.0), advanced=None
            )
        if command.kind == "release":
            self.job_id, self.job = "", None
        return DONE if command.kind == "do" else ins.Report()


class FakeConnection:
    """Connection whose server releases the job while the leader waits for that."""

    host, insecure = "127.0.0.1", False

    def __init__(self, *assignments):
        self._assignments, self._replies = list(assignments), [EVALUATE, LEAVE]
        self.sent, self.finished, self.job_id = [], [], ""
        self._over = False
        self.stopped = SimpleNamespace(is_set=lambda: self._over, wait=self._wait)

    def _wait(self, timeout_s):
        self._over = True

    def begin_job(self, job_id):
        self.job_id, self._over = job_id, False

    def next_assignment(self, timeout_s):
        return self._assignments.pop(0) if self._assignments else None

    def send(self, role, **message):
        self.sent += [(role, kind) for kind in message]

    def ask(self, request):
        self.finished.append([task.task for task in request.finished])
        return self._replies.pop(0)


@pytest.fixture(autouse=True)
def no_services(monkeypatch):
    service = SimpleNamespace(address="127.0.0.1:1", version=0, pop_changes=lambda: (None, b""), stop=lambda: None)
    monkeypatch.setattr(leaders, "StateService", lambda *_: service)
    monkeypatch.setattr("hfdt.runtime.leader.connect", lambda *_, **__: SimpleNamespace(close=lambda: None))


RING_SENT = [("shard", "ready"), ("worker", "ready"), ("worker", "finished"), ("shard", "finished")]


def test_a_ring_serves_its_state_until_the_server_releases_the_job():
    ring, connection = FakeRing(), FakeConnection(SHARD, WORKER, DISMISS)
    Leader(ring, connection).run()
    assert ring.kinds == ["job", "do", "idle", "release", "quit"]
    assert connection.sent == RING_SENT
    assert connection.finished == [[], [3]], "the report of the instruction comes with the next request"


def test_a_group_ends_with_its_work():
    ring, connection = FakeRing(), FakeConnection(WORKER, DISMISS)
    GroupLeader(ring, connection, (0, 1)).run()
    assert ring.kinds == ["job", "do", "release", "quit"]
    assert connection.sent == [("worker", "ready"), ("worker", "finished")]


def test_ranks_learn_that_a_leader_without_assignment_waits():
    ring, connection = FakeRing(), FakeConnection()
    answers = iter([None, None, DISMISS])
    connection.next_assignment = lambda timeout_s: next(answers)
    Leader(ring, connection).run()
    assert ring.kinds == ["idle", "idle", "quit"]


@pytest.mark.parametrize(
    ("interrupted", "kinds"),
    [
        (1, ["job", "job", "do", "idle", "idle", "release", "quit"]),
        (2, ["job", "do", "do", "idle", "release", "quit"]),
        (3, ["job", "do", "idle", "idle", "release", "quit"]),
        (4, ["job", "do", "idle", "idle", "release", "quit"]),
        (5, ["job", "do", "idle", "idle", "release", "release", "release", "quit"]),  # a second one has no effect
    ],
)
def test_an_elastic_ring_repeats_what_not_all_ranks_have_executed(interrupted, kinds):
    ring, connection = FakeRing({interrupted}), FakeConnection(SHARD, WORKER, DISMISS)
    leader = ElasticLeader(ring, connection)
    with pytest.raises(Interrupted):
        leader.run()
    ring.pending = DONE if interrupted == 3 else ins.Report()  # the report of the last commit
    leader.run()
    assert ring.kinds == kinds
    assert connection.sent == RING_SENT
    assert connection.finished == [[], [3]]
