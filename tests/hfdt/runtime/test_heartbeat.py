"""Rank 0 tells the job server that its world makes headway."""

from types import SimpleNamespace

import pytest

pytest.importorskip("horovod", reason="no Horovod: ./scripts/install-horovod")

from hfdt.runtime.elastic.leader import ElasticLeader
from hfdt.runtime.group_job import GroupLeader
from hfdt.runtime.roles import Leader
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins

EVALUATE = pb.NextReply(evaluate=pb.Evaluate(epoch=0))
LEAVE = pb.NextReply(leave=pb.Leave(reason="done"))


class Attendance:
    """Answers the leader's calls, and keeps them."""

    def __init__(self):
        self.stopped = SimpleNamespace(is_set=lambda: False)
        self.asked, self.told = [], [EVALUATE, LEAVE]

    def ask(self, request):
        self.asked.append(pb.NextRequest.FromString(request.SerializeToString()))
        return pb.NextReply(wait=pb.Wait()) if request.busy else self.told.pop(0)


class Job:
    """Two batches to an evaluation."""

    def __init__(self, heartbeat_s):
        self.spec = SimpleNamespace(heartbeat_s=heartbeat_s, algorithm=SimpleNamespace(codec="identity"))
        self.samples = self.steps = self.compute_s = 0

    def statistics(self):
        return {}

    def execute(self, instruction):
        for _ in range(2):
            self.advanced()
        return ins.Report(evaluated=ins.Evaluated(0, (), b""))


WORLD = SimpleNamespace(size=2, broadcast=lambda data: data)
SERVICE = SimpleNamespace(take_changes=lambda: (None, b""), version=0)


@pytest.mark.parametrize(("heartbeat_s", "busy"), [(0.0, [False, True, True, False]), (60.0, [False, False])])
@pytest.mark.parametrize("kind", ["ring", "group"])
def test_the_server_hears_of_each_batch_if_it_was_told_nothing_for_long(kind, heartbeat_s, busy):
    attendance = Attendance()
    leader = Leader(WORLD, attendance) if kind == "ring" else GroupLeader(WORLD, attendance, (0, 1), None)
    leader._work(Job(heartbeat_s), "job-1", "worker-0", SERVICE)
    assert [request.busy for request in attendance.asked] == busy
    assert {(request.job_id, request.worker) for request in attendance.asked} == {("job-1", "worker-0")}


def test_the_leader_of_an_elastic_ring_tells_too():
    attendance, job = Attendance(), Job(0.0)
    attendance.job_id, attendance.say = "job-1", lambda *_, **__: None
    leader = ElasticLeader(SimpleNamespace(job=job), attendance, 1.0)
    leader._on_engaged(pb.Assignment(worker=pb.WorkerAssignment(job_id="job-1", worker="worker-0")))
    job.execute(EVALUATE)
    assert [(request.worker, request.busy) for request in attendance.asked] == [("worker-0", True)] * 2
