"""Slots that cannot reach the server for a while resume where they stopped: none is lost, nothing is done twice."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nfdt.core.errors import AuthenticationFailed, NotStored
from nfdt.core.host.machine import boot_id
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import MESSAGE_BYTES, open_channel
from nfdt.core.wire.job_token import worker_token
from tests.support.fakes import DEADLINE_S, TOKEN, FakeSlot, of
from tests.support.relay import Relay

PATIENT = {"patience_s": DEADLINE_S}


@pytest.fixture
def relay(cluster) -> Iterator[Relay]:
    cluster.start(shards=1)
    relay = Relay(cluster.server.address)
    yield relay
    relay.close()


class Gate:
    """Gate that holds a worker inside one of its tasks (None: the first) until the test opens it."""

    def __init__(self, task: int | None) -> None:
        self._task = task
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, slot, task):
        if self._task in (None, task.task):
            self.reached.set()
            assert self.open.wait(DEADLINE_S)

    def after(self, slot, task):
        """Gate for another worker that opens when this one is reached."""
        assert self.reached.wait(DEADLINE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate(2)
    yield gate
    gate.open.set()


@pytest.fixture
def first_gate() -> Iterator[Gate]:
    gate = Gate(None)
    yield gate
    gate.open.set()


def slots_of(cluster, address, *tasks, **options):
    """Return patient worker slots that reach the server at ``address``."""
    hello = options.pop("hello", {})
    made = [
        FakeSlot(address, "worker", f"patient-{i}", on_task=on_task, hello=hello, **{**PATIENT, **options})
        for i, on_task in enumerate(tasks or (lambda slot, task: None,))
    ]
    cluster.slots += made
    return made


def wait_until(pool, condition) -> bool:
    """Return whether a condition over the pool becomes true in time."""
    with pool._changed:
        return pool._changed.wait_for(condition, DEADLINE_S)


def away(cluster) -> bool:
    pool = cluster.server.context.pool
    return wait_until(pool, lambda: any(slot.away for slot in pool._slots))


def attending(cluster, count) -> bool:
    pool = cluster.server.context.pool
    return wait_until(pool, lambda: pool.attending("worker")[1] == count)


def test_a_worker_whose_connection_is_cut_goes_on_and_nothing_is_done_twice(cluster, relay, gate):
    (slot,) = slots_of(cluster, relay.address, gate)
    client = cluster.client()
    job = client.submit(client.spec(epochs=2, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    relay.cut()
    assert away(cluster)
    gate.open.set()
    relay.mend()
    events = client.finish(job)
    assert events[-1][1]["state"] == "succeeded"
    assert of(events, "worker_lost") == []
    assert sorted(slot.trained) == list(range(20))
    assert [e["samples"] for e in of(events, "epoch_end")] == [40, 40]


@pytest.mark.parametrize("most", [MESSAGE_BYTES, 0], ids=["short", "long"])
def test_a_call_whose_answer_was_lost_is_answered_again_and_counts_once(most, cluster, relay, monkeypatch):
    """Cut the connection whenever the server has answered: every third answer is lost."""
    from nfdt.jobserver.waiting_calls import WaitingCalls
    from nfdt.jobserver.worker_calls import WorkerCalls

    monkeypatch.setattr("nfdt.jobserver.worker_calls.MESSAGE_BYTES", most)
    monkeypatch.setattr("nfdt.core.work.slot_connection.MESSAGE_BYTES", most)
    short, long, calls = WaitingCalls.next, WorkerCalls.next, []

    def note(request, reply):
        calls.append((request.call, reply.WhichOneof("instruction")))
        if len(calls) % 3 == 0 and len(calls) < 16:
            relay.cut()
            relay.mend()

    async def lose_short(run, request):
        encoded = await short(run, request)
        note(request, pb.NextReply.FromString(encoded))
        return encoded

    def lose_long(run, request, alive):
        reply = long(run, request, alive)
        note(request, reply)
        return reply

    monkeypatch.setattr(WaitingCalls, "next", lose_short)
    monkeypatch.setattr(WorkerCalls, "next", lose_long)
    (slot,) = slots_of(cluster, relay.address)
    client = cluster.client()
    events = client.finish(client.submit(client.spec(epochs=3, workers=1)))
    assert events[-1][1]["state"] == "succeeded"
    numbers = [number for number, _ in calls]
    assert len(numbers) > len(set(numbers)), "no answer was lost"
    assert len(set(calls)) == len(set(numbers)), "a call made again was answered differently"
    assert sorted(slot.trained) == list(range(30))
    assert [e["logs"]["steps"] for e in of(events, "epoch_end")] == [10, 10, 10]


def test_a_worker_that_computes_longer_than_silence_may_last_is_not_lost(cluster):
    cluster.start(shards=1)

    def compute(slot, task):
        until = time.monotonic() + 3.0
        while task.task == 2 and time.monotonic() < until:
            pass  # in Python, all the time

    (slot,) = slots_of(cluster, cluster.server.address, compute)
    client = cluster.client()
    spec = client.spec(epochs=2, workers=1)
    spec["cluster"] |= {"heartbeat_s": 0.2, "lost_s": 2.0}
    events = client.finish(client.submit(spec))
    assert events[-1][1]["state"] == "succeeded"
    assert of(events, "worker_lost") == []
    assert sorted(slot.trained) == list(range(20))
    beats = {known.name: known.beats for known in cluster.server.context.pool._slots}
    assert beats[slot.name]


def test_a_shard_s_connection_is_cut_and_the_job_goes_on(cluster, relay, gate):
    cluster.slots[0].close()
    cluster.slots.append(FakeSlot(relay.address, "shard", "patient-shard", **PATIENT))
    cluster.add("worker", on_task=gate)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    relay.cut()
    assert away(cluster)
    gate.open.set()
    relay.mend()
    assert client.finish(job)[-1][1]["state"] == "succeeded"


def test_a_slot_that_does_not_come_back_in_time_is_lost(cluster, relay, first_gate):
    slots_of(cluster, relay.address, first_gate, patience_s=0.2)
    cluster.add("worker", on_task=first_gate.after)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=2))
    assert first_gate.reached.wait(DEADLINE_S)
    relay.cut()
    events = client.finish(job)
    assert len(of(events, "worker_lost")) == 1
    assert of(events, "epoch_end")[0]["samples"] == 40


def test_a_slot_that_is_known_to_have_ended_is_lost_at_once_however_patient(cluster, relay, first_gate):
    slots_of(cluster, relay.address, first_gate, patience_s=3600.0)
    cluster.add("worker", on_task=first_gate.after)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=2))
    assert first_gate.reached.wait(DEADLINE_S)
    relay.cut()
    assert away(cluster)
    with open_channel(cluster.server.address, TOKEN) as channel:
        workers_pb2_grpc.WorkersStub(channel).Ended(pb.SlotEnded(name="patient-0"), timeout=DEADLINE_S)
    assert len(of(client.finish(job), "worker_lost")) == 1


def test_a_process_of_this_machine_that_has_ended_is_lost_at_once_however_patient(cluster, relay, first_gate):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = {"pid": process.pid, "host": socket.gethostname(), "boot_id": boot_id()}
    slots_of(cluster, relay.address, first_gate, patience_s=3600.0, hello=here)
    cluster.add("worker", on_task=first_gate.after)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=2))
    assert first_gate.reached.wait(DEADLINE_S)
    relay.cut()
    assert away(cluster)
    process.kill()  # it stays a zombie until the end of the test
    assert len(of(client.finish(job), "worker_lost")) == 1
    process.communicate()


def test_a_slot_gets_no_work_while_it_is_away_and_some_when_it_is_back(cluster, relay):
    (slot,) = slots_of(cluster, relay.address)
    assert attending(cluster, 1)
    relay.cut()
    assert away(cluster)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=1))
    assert cluster.server.context.pool.attending("worker") == (1, 0)
    assert client.show(job).state == "queued"
    relay.mend()
    assert client.finish(job)[-1][1]["state"] == "succeeded"
    assert len(slot.trained) == 10


def test_slots_outlive_a_restart_of_the_server(cluster, relay, gate):
    (slot,) = slots_of(cluster, relay.address, gate)
    client = cluster.client()
    client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    relay.cut()
    cluster.server.stop()
    gate.open.set()
    cluster.start(shards=1)
    relay.redirect(cluster.server.address)
    relay.mend()
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=1))
    assert client.finish(job)[-1][1]["state"] == "succeeded"
    kinds = [type(assignment).__name__ for assignment in slot.assignments]
    assert kinds[:3] == ["WorkerAssignment", "Release", "WorkerAssignment"]


def test_a_call_that_comes_late_is_not_taken_for_a_new_one(cluster, relay, gate):
    slots_of(cluster, relay.address, gate)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    found = cluster.server.scheduler.job_of(job)
    late = pb.NextRequest(job_id=job, worker="worker-0", call=1, finished=[pb.Finished(task=2, samples=4)], wait_s=5)
    late.job_token = worker_token(found.core.slots.token, "worker-0")
    assert found.workers.next(late, lambda: True).WhichOneof("instruction") == "wait"
    book = found.core.training.coordinator.run.training.book
    assert [task.task for task in book.held("worker-0")] == [2]
    gate.open.set()
    assert client.finish(job)[-1][1]["state"] == "succeeded"


def test_only_its_worker_fetches_a_long_answer_and_only_the_last(cluster, relay, gate, monkeypatch):
    monkeypatch.setattr("nfdt.jobserver.worker_calls.MESSAGE_BYTES", 0)
    slots_of(cluster, relay.address, gate)
    client = cluster.client()
    job = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    found = cluster.server.scheduler.job_of(job)
    number = found.core.slots.workers["worker-0"].long_replies
    request = pb.FetchReplyRequest(job_id=job, worker="worker-0", number=number)
    with pytest.raises(AuthenticationFailed, match="worker-0"):
        found.workers.long_reply(request)
    request.job_token = worker_token(found.core.slots.token, "worker-0")
    assert pb.NextReply.FromString(found.workers.long_reply(request)).work.tasks[0].task <= 2
    request.number -= 1
    with pytest.raises(NotStored, match="newer"):
        found.workers.long_reply(request)
    gate.open.set()
    assert client.finish(job)[-1][1]["state"] == "succeeded"
