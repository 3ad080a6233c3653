"""Heartbeats of rank 0 to the job server while its ranks execute an instruction."""

from types import SimpleNamespace

import pytest

pytest.importorskip("horovod")

from hfdt.runtime.leader import GroupLeader, Leader
from hfdt.runtime.ring import RingMember
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins

EVALUATE = pb.NextReply(evaluate=pb.Evaluate(epoch=0))


class FakeConnection:
    """Connection that answers the leader's calls, and keeps them."""

    def __init__(self):
        self.asked = []

    def send(self, role, **message):
        """Drop a message."""

    def ask(self, request):
        self.asked.append(pb.NextRequest.FromString(request.SerializeToString()))
        return pb.NextReply(wait=pb.Wait()) if request.busy else EVALUATE


class Job:
    """Job with two batches per evaluation."""

    def __init__(self, busy_report_s):
        self.spec = SimpleNamespace(busy_report_s=busy_report_s, algorithm=SimpleNamespace(codec="identity"))
        self.samples = self.steps = self.compute_s = 0

    def statistics(self):
        return {}

    def execute(self, instruction):
        for _ in range(2):
            self.advanced()
        return ins.Report(evaluated=ins.Evaluated(0, (), b""))


def leader_of(kind, job, connection):
    """Return the leader of a ring that is at work; its ring is this rank alone."""
    ring = RingMember(SimpleNamespace(size=1, broadcast=lambda data: data), None)
    ring.job, ring.job_id = job, "job-1"
    leader = kind(ring, connection)
    leader._start_work(pb.WorkerAssignment(job_id="job-1", worker="worker-0"))
    return leader


@pytest.mark.parametrize(("busy_report_s", "busy"), [(0.0, [False, True, True]), (60.0, [False])])
@pytest.mark.parametrize("kind", [Leader, GroupLeader])
def test_each_batch_sends_a_heartbeat_if_the_last_message_is_old_enough(kind, busy_report_s, busy):
    connection = FakeConnection()
    leader_of(kind, Job(busy_report_s), connection)._exchange()
    assert [request.busy for request in connection.asked] == busy
    assert {request.worker for request in connection.asked} == {"worker-0"}
