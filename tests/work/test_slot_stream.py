"""Messages of a slot whose stream is opened again: at the same server, and at one that has been restarted."""

from __future__ import annotations

import queue
import threading

import pytest

from nfdt.core.errors import ServerUnreachable
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import patience
from nfdt.core.work.slot_connection import SlotStream, make_hello

DEADLINE_S = 60
SILENCE_S = 0.2


class TwoStreams:
    """Server of one slot whose first stream breaks after an assignment; on the second one the slot is released.

    Args:
        resumed: Whether the server knows the slot when it opens the second stream.

    Attributes:
        early: Whether the slot sent anything on the second stream before its welcome.
        later: Messages on the second stream.
    """

    def __init__(self, resumed: bool) -> None:
        self._resumed = resumed
        self._streams = 0
        self.early: bool | None = None
        self.later: queue.SimpleQueue[pb.SlotMessage] = queue.SimpleQueue()

    def Attend(self, messages, wait_for_ready):
        self._streams += 1
        assert next(messages).HasField("hello")
        if self._streams == 1:
            yield pb.Assignment(welcome=pb.Welcome(resumed=False))
            yield pb.Assignment(shard=pb.ShardAssignment(job_id="job"), number=1)
            raise ServerUnreachable("The server is gone.")
        threading.Thread(target=self._read, args=(messages,), daemon=True).start()
        try:
            self.later.put(self.later.get(timeout=SILENCE_S))
            self.early = True
        except queue.Empty:
            self.early = False
        yield pb.Assignment(welcome=pb.Welcome(resumed=self._resumed))
        yield pb.Assignment(release=pb.Release(job_id="job"), number=2 if self._resumed else 1)

    def _read(self, messages):
        for message in messages:
            self.later.put(message)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(patience, "PAUSE_S", 0.0)


@pytest.mark.parametrize(("resumed", "first"), [(True, "ready"), (False, "finished")], ids=["known", "unknown"])
def test_a_restarted_server_gets_no_messages_for_the_last_one(resumed, first):
    server = TwoStreams(resumed)
    stream = SlotStream(server, make_hello("slot", "shard", resumes=True, patience_s=DEADLINE_S), "address")
    for assignment in stream.assignments():
        if assignment.HasField("shard"):
            stream.send(ready=pb.SlotReady(job_id="job", address="address:1"))
        elif assignment.number:
            stream.send(finished=pb.SlotFinished(job_id="job"))
    stream.close()
    assert server.early is False
    assert server.later.get(timeout=DEADLINE_S).WhichOneof("message") == first


@pytest.mark.parametrize(("resumed", "first"), [(True, "failed"), (False, "finished")], ids=["known", "unknown"])
def test_a_restarted_server_gets_no_late_messages_about_assignments_of_the_last_one(resumed, first):
    server = TwoStreams(resumed)
    stream = SlotStream(server, make_hello("slot", "shard", resumes=True, patience_s=DEADLINE_S), "address")
    for assignment in stream.assignments():
        if assignment.HasField("shard"):
            send = stream.sender()
        elif assignment.number:
            send(failed=pb.SlotFailed(job_id="job"))
            stream.sender()(finished=pb.SlotFinished(job_id="job"))
    stream.close()
    assert server.later.get(timeout=DEADLINE_S).WhichOneof("message") == first


class BeatingServer:
    """Server of one slot that asks for a heartbeat every few milliseconds, and waits for some."""

    def __init__(self, count: int) -> None:
        self._count, self.received = count, []

    def Attend(self, messages, wait_for_ready):
        assert next(messages).HasField("hello")
        yield pb.Assignment(heartbeat=pb.Heartbeat(every_s=0.002))
        yield pb.Assignment(welcome=pb.Welcome(resumed=False))
        yield pb.Assignment(shard=pb.ShardAssignment(job_id="job"), number=1)
        while len(self.received) < self._count:
            self.received.append(next(messages))
        yield pb.Assignment(dismiss=pb.Dismiss(), number=2)


def test_a_slot_sends_heartbeats_at_the_interval_of_the_server_and_its_messages_once():
    server = BeatingServer(4)
    stream = SlotStream(server, make_hello("slot", "shard", resumes=True, patience_s=DEADLINE_S), "address")
    for assignment in stream.assignments():
        if assignment.HasField("shard"):
            stream.send(ready=pb.SlotReady(job_id="job", address="address:1"))
        assert not assignment.HasField("heartbeat")
    stream.close()
    kinds = [(message.WhichOneof("message"), message.number) for message in server.received]
    assert sorted(set(kinds)) == [("heartbeat", 0), ("ready", 1)]
    assert kinds.count(("ready", 1)) == 1
    assert {message.received for message in server.received if not message.number} == {1}


@pytest.mark.parametrize(
    ("role", "visible", "device"),
    [("worker", "0,2", "gpu:0,2"), ("worker", "3", "gpu:3"), ("worker", "", "cpu"), ("shard", "0", "cpu")],
)
def test_a_slot_names_the_gpus_that_its_launcher_left_it(monkeypatch, role, visible, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert make_hello("slot", role).device == device
