"""Jobs that wait, pass others, are resumed and deleted; the list of slots. Slots are fakes."""

from __future__ import annotations

import json
import logging

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.jobserver import scheduler
from tests.support.fakes import DEADLINE_S, of


@pytest.fixture
def passing(monkeypatch):
    monkeypatch.setattr(scheduler, "PASSED_AFTER_S", 0.0)


def held_by(gate):
    return lambda slot, task: gate.wait(DEADLINE_S)


def ended(client, job):
    return client.finish(job)[-1][1]["state"]


def listed(client):
    return {job.job_id: job for job in client.call("List", pb.ListRequest()).jobs}


def test_two_jobs_run_at_a_time_when_slots_are_free(start, cluster, gate):
    client = start(shards=2)
    cluster.add("worker", 2, on_task=held_by(gate))
    first, second = (client.submit(client.spec(workers=1, epochs=1)) for _ in range(2))
    for job in (first, second):
        client.until(job, "epoch_begin")
    assert {listed(client)[job].state for job in (first, second)} == {"running"}
    gate.set()
    assert [ended(client, job) for job in (first, second)] == ["succeeded", "succeeded"]


def test_a_job_that_lacks_slots_does_not_hold_up_a_smaller_one(start, passing):
    client = start(shards=2, workers=2)
    large = client.submit(client.spec(workers=3, epochs=1))
    small = client.submit(client.spec(workers=1, epochs=1))
    assert ended(client, small) == "succeeded"
    assert listed(client)[large].state == "queued"


def test_a_job_that_was_passed_gets_its_slots_once_they_exist(start, cluster, passing, gate):
    client = start(shards=2)
    cluster.add("worker", 2, on_task=held_by(gate))
    large = client.submit(client.spec(workers=3, epochs=1))
    small = client.submit(client.spec(workers=2, epochs=1))
    client.until(small, "epoch_begin")
    cluster.add("worker", 1)
    later = client.submit(client.spec(workers=1, epochs=1))
    assert listed(client)[later].place == 2, "enough slots for the first job exist, so nothing passes it any more"
    gate.set()
    events = client.finish(large)
    assert events[-1][1]["state"] == "succeeded"
    assert len(of(events, "worker_joined")) == 3
    assert ended(client, later) == "succeeded"


def test_a_job_that_waits_for_busy_slots_is_not_passed(start, cluster, passing, gate):
    client = start(shards=3)
    cluster.add("worker", 2, on_task=held_by(gate))
    running = client.submit(client.spec(workers=1, epochs=1))
    client.until(running, "epoch_begin")
    large = client.submit(client.spec(workers=2, epochs=1))
    small = client.submit(client.spec(workers=1, epochs=1))
    places = {job: entry.place for job, entry in listed(client).items()}
    assert places == {running: 0, large: 1, small: 2}
    assert cluster.server.scheduler.workers_wanted() == 1 + 2 + 1
    gate.set()
    for job in (running, large, small):
        assert ended(client, job) == "succeeded"
    began = [listed(client)[job].started_at for job in (running, large, small)]
    assert began == sorted(began)


def test_a_waiting_job_is_cancelled_at_once_wherever_it_is_in_the_queue(start):
    client = start(shards=1)
    client.submit(client.spec(workers=1))
    second = client.submit(client.spec(workers=1))
    client.control(second, cancel=pb.Cancel(reason="changed my mind"))
    assert ended(client, second) == "cancelled"


def test_slots_are_listed_with_machine_role_versions_and_job(start, cluster, gate):
    client = start(shards=1)
    cluster.add("worker", 2, on_task=held_by(gate), hello={"host": "elsewhere", "device": "gpu:0"})
    job = client.submit(client.spec(workers=1))
    client.until(job, "epoch_begin")
    slots = list(client.call("Slots", pb.SlotsRequest()).slots)
    assert sorted((slot.role, slot.job_id) for slot in slots) == [("shard", job), ("worker", ""), ("worker", job)]
    worker = next(slot for slot in slots if slot.role == "worker")
    assert (worker.host, worker.device, worker.versions["keras"]) == ("elsewhere", "gpu:0", "3.15.1")


def test_slots_are_listed_only_with_a_token(start, cluster):
    start(workers=1)
    with pytest.raises(PermissionError):
        cluster.client("wrong").call("Slots", pb.SlotsRequest())


def test_the_log_names_who_submitted_a_job_its_slots_and_its_end(start, cluster, caplog):
    caplog.set_level(logging.INFO)
    client = start(shards=1, workers=1)
    job = client.submit(client.spec(workers=1, user="ada", script="train.py"))
    client.finish(job)
    lines = [record.getMessage() for record in caplog.records if job in record.getMessage()]
    assert any("submitted by ada with train.py at ipv4:127.0.0.1" in line for line in lines)
    assert any("starts with shard-slot-0 on" in line and "worker-slot-1 on" in line for line in lines)
    assert any(line.startswith(f"job {job} succeeded after ") for line in lines)


@pytest.mark.parametrize("field", ["user", "script", "name"])
def test_control_characters_in_names_are_refused(start, field):
    client = start()
    with pytest.raises(UsageError, match=field):
        client.submit(client.spec(**{field: "\x1b[2Jroot"}))


def cancelled_after_first_epoch(client, gate):
    job = client.submit(client.spec(workers=1, epochs=3))
    client.until(job, "epoch_end", epoch=0)
    client.control(job, cancel=pb.Cancel())
    gate.set()
    assert ended(client, job) == "cancelled"
    return job


@pytest.fixture
def client(start, cluster, gate):
    """Provide a client of a server whose worker stops in the second epoch until the gate opens."""
    client = start(shards=1)
    cluster.add("worker", 1, on_task=lambda slot, task: len(slot.trained) < 10 or gate.wait(DEADLINE_S))
    return client


def test_a_resumed_job_trains_the_remaining_epochs_from_the_last_state(client, cluster, gate):
    job = cancelled_after_first_epoch(client, gate)
    description = client.show(job)
    assert description.resumable_from == 1
    again = client.call("Resume", pb.JobRef(job_id=job)).job_id
    events = client.finish(again)
    assert events[-1][1]["state"] == "succeeded"
    assert [one["epoch"] for one in of(events, "epoch_end")] == [1, 2]
    manifest = json.loads(client.download(client.show(again).program))
    before = json.loads(client.download(description.program))
    assert {name for name in manifest if manifest[name] != before[name]} == {"state"}
    state = client.download(manifest["state"])
    client.call("Delete", pb.DeleteRequest(job_id=job))
    assert client.download(manifest["state"]) == state, "the resumed job needs the state of the one before"


@pytest.mark.parametrize(
    ("state", "needle"), [("succeeded", "one that is succeeded"), ("early", "ended in its first epoch")]
)
def test_a_job_without_a_state_to_go_on_from_is_not_resumed(start, gate, state, needle):
    client = start(shards=1, workers=int(state == "succeeded"))
    job = client.submit(client.spec(workers=1, epochs=1))
    if state == "early":
        client.control(job, cancel=pb.Cancel())
    client.finish(job)
    with pytest.raises(UsageError, match=needle):
        client.call("Resume", pb.JobRef(job_id=job))


def test_a_deleted_job_is_gone_with_its_artifacts(start, cluster):
    client = start(shards=1, workers=1)
    job = client.submit(client.spec(workers=1))
    client.finish(job)
    result = client.show(job).result_artifact
    reply = client.call("Delete", pb.DeleteRequest(job_id=job))
    assert list(reply.job_ids) == [job]
    assert reply.bytes > 0
    assert list((cluster.state_dir / "artifacts").iterdir()) == []
    with pytest.raises(UsageError, match="No job"):
        client.show(job)
    with pytest.raises(UsageError, match="not on this server"):
        client.download(result)


def test_a_job_that_has_not_ended_is_not_deleted(start):
    client = start()
    job = client.submit(client.spec(workers=1))
    with pytest.raises(UsageError, match="nfdt jobs cancel"):
        client.call("Delete", pb.DeleteRequest(job_id=job))


def test_pruning_removes_only_jobs_that_ended_long_enough_ago(start):
    client = start(shards=1, workers=1)
    done = client.submit(client.spec(workers=1))
    client.finish(done)
    waiting = client.submit(client.spec(workers=5))
    assert list(client.call("Delete", pb.DeleteRequest(older_than_s=3600)).job_ids) == []
    assert list(client.call("Delete", pb.DeleteRequest(older_than_s=0)).job_ids) == [done]
    assert list(listed(client)) == [waiting]
