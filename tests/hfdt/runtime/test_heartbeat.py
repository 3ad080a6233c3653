"""Heartbeats of rank 0 to the job server while its ranks execute an instruction."""

from types import SimpleNamespace

import pytest

pytest.importorskip("horovod")

from hfdt.runtime.elastic.rank import ElasticLeader
from hfdt.runtime.execution import Command
from hfdt.runtime.leader import GroupLeader, Leader
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins

EVALUATE = pb.NextReply(evaluate=pb.Evaluate(epoch=0))
LEAVE = pb.NextReply(leave=pb.Leave(reason="done"))


class FakeConnection:
    """Connection that answers the leader's calls, and keeps them."""

    def __init__(self):
        self.stopped = SimpleNamespace(is_set=lambda: False)
        self.asked, self._replies = [], [EVALUATE, LEAVE]

    def ask(self, request):
        self.asked.append(pb.NextRequest.FromString(request.SerializeToString()))
        return pb.NextReply(wait=pb.Wait()) if request.busy else self._replies.pop(0)


class Job:
    """Job with two batches per evaluation."""

    def __init__(self, heartbeat_s):
        self.spec = SimpleNamespace(heartbeat_s=heartbeat_s, algorithm=SimpleNamespace(codec="identity"))
        self.samples = self.steps = self.compute_s = 0

    def statistics(self):
        return {}

    def execute(self, instruction):
        for _ in range(2):
            self.advanced()
        return ins.Report(evaluated=ins.Evaluated(0, (), b""))


COMMUNICATOR = SimpleNamespace(size=2, broadcast=lambda data: data)
SERVICE = SimpleNamespace(command=lambda reply: Command("do", reply=reply.SerializeToString()), version=0)


@pytest.mark.parametrize(("heartbeat_s", "busy"), [(0.0, [False, True, True, False]), (60.0, [False, False])])
@pytest.mark.parametrize("kind", ["ring", "group"])
def test_each_batch_sends_a_heartbeat_if_the_last_message_is_old_enough(kind, heartbeat_s, busy):
    connection = FakeConnection()
    leader = (
        Leader(COMMUNICATOR, connection, None)
        if kind == "ring"
        else GroupLeader(COMMUNICATOR, connection, None, (0, 1))
    )
    leader._work(Job(heartbeat_s), "worker-0", SERVICE)
    assert [request.busy for request in connection.asked] == busy
    assert {request.worker for request in connection.asked} == {"worker-0"}


def test_the_leader_of_an_elastic_ring_sends_heartbeats_too():
    connection, job = FakeConnection(), Job(0.0)
    connection.job_id, connection.send = "job-1", lambda *_, **__: None
    leader = ElasticLeader(SimpleNamespace(job=job), connection, 1.0)
    leader._on_engaged(pb.Assignment(worker=pb.WorkerAssignment(job_id="job-1", worker="worker-0")))
    job.execute(EVALUATE)
    assert [(request.worker, request.busy) for request in connection.asked] == [("worker-0", True)] * 2
