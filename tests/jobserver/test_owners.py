"""Owners of jobs on a server with several tokens: what each sees and may do, and the audit log."""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from types import SimpleNamespace

import grpc
import pytest

from nfdt.core.errors import PolicyRefused, UsageError
from nfdt.core.jobs.admission import Limits
from nfdt.core.jobs.artifacts import FILE_BYTES
from nfdt.core.wire import jobs_pb2
from tests.support.fakes import DEADLINE_S, TOKEN
from tests.support.soak.stranger import Stranger

ALICE, BOARD, BOB, RACK = ("a" * 16, "b" * 16, "c" * 16, "d" * 16)
TOKENS = (
    TOKEN,
    f"vision train {ALICE} workers=2",
    f"vision read {BOARD}",
    f"speech train {BOB}",
    f"rack work {RACK}",
)


@pytest.fixture
def job(start, cluster):
    """A job of the owner ``vision`` that has ended."""
    start(workers=1, shards=1, tokens=TOKENS)
    alice = cluster.client(ALICE)
    job = alice.submit(alice.spec(workers=1, epochs=1))
    assert alice.finish(job)[-1][1]["state"] == "succeeded"
    return job


def jobs(client) -> list[str]:
    return [one.job_id for one in client.call("List", jobs_pb2.ListRequest()).jobs]


def test_only_the_owner_and_administrators_see_a_job(job, cluster):
    assert jobs(cluster.client(ALICE)) == jobs(cluster.client(BOARD)) == jobs(cluster.client(TOKEN)) == [job]
    stranger = cluster.client(BOB)
    assert jobs(stranger) == []
    reference = jobs_pb2.JobRef(job_id=job)
    for method in ("Show", "Snapshot", "Resume"):
        with pytest.raises(UsageError, match="No job"):
            stranger.call(method, reference)
    with pytest.raises(UsageError, match="No job"):
        stranger.control(job, cancel=jobs_pb2.Cancel())
    with pytest.raises(UsageError, match="No job"):
        stranger.finish(job)
    with pytest.raises(UsageError, match="No job"):
        stranger.call("Delete", jobs_pb2.DeleteRequest(job_id=job))
    assert list(stranger.call("Delete", jobs_pb2.DeleteRequest(older_than_s=0)).job_ids) == []
    assert jobs(cluster.client(TOKEN)) == [job]


def test_a_reader_changes_nothing(job, cluster):
    reader = cluster.client(BOARD)
    assert reader.show(job).state == "succeeded"
    with pytest.raises(PolicyRefused, match="the token of vision, whose role is read"):
        reader.call("Delete", jobs_pb2.DeleteRequest(job_id=job))
    with pytest.raises(PolicyRefused, match="FindMissing"):
        reader.call("FindMissing", jobs_pb2.ArtifactNames(sha256=["0" * 64]))


def test_an_unfinished_upload_spoils_none_of_another_owner(start, cluster):
    start(tokens=TOKENS)
    data = b"public data"
    name = hashlib.sha256(data).hexdigest()
    bob, alice = cluster.client(BOB), cluster.client(ALICE)

    def send(client, content):
        return client.stub.Upload(iter([jobs_pb2.Chunk(sha256=name, total_bytes=len(data), data=content)]))

    def have_bytes(client):
        found = client.call("FindMissing", jobs_pb2.ArtifactNames(sha256=[name])).missing
        return [missing.have_bytes for missing in found]

    with pytest.raises(grpc.RpcError):
        send(bob, b"garbage")
    assert have_bytes(bob) == [len(b"garbage")]
    assert have_bytes(alice) == [0]
    assert send(alice, data).total_bytes == len(data)
    assert have_bytes(alice) == have_bytes(bob) == []


def test_uploads_without_a_job_are_limited_for_users_and_not_for_administrators(start, cluster):
    start(tokens=TOKENS, limits=Limits(state_dir_bytes=4 * FILE_BYTES))

    def send(token, number):
        data = bytes([number]) * FILE_BYTES
        chunk = jobs_pb2.Chunk(sha256=hashlib.sha256(data).hexdigest(), total_bytes=len(data), data=data)
        cluster.client(token).stub.Upload(iter([chunk]))

    send(BOB, 1)
    with pytest.raises(grpc.RpcError, match="no job names"):
        send(BOB, 2)
    send(TOKEN, 2)
    send(TOKEN, 3)


def test_a_worker_s_token_is_for_slots(job, cluster):
    worker = cluster.client(RACK)
    worker.call("Describe", jobs_pb2.DescribeRequest())
    with pytest.raises(PolicyRefused, match="whose role is work"):
        worker.call("List", jobs_pb2.ListRequest())


def test_the_slots_of_another_owner_s_job_are_shown_as_taken(start, cluster):
    start(shards=1, tokens=TOKENS)
    alice = cluster.client(ALICE)
    job = alice.submit(alice.spec(workers=1))

    seen = {}

    def on_task(slot, task):
        for token in (ALICE, BOB):
            slots = cluster.client(token).call("Slots", jobs_pb2.SlotsRequest()).slots
            seen[token] = {slot.job_id for slot in slots}

    cluster.add("worker", on_task=on_task)
    alice.finish(job)
    assert seen == {ALICE: {job}, BOB: {"(another owner's)"}}


def test_a_job_above_a_quota_waits_for_others_of_its_owner_and_holds_up_nobody(start, cluster, gate):
    start(shards=4, tokens=TOKENS)
    cluster.add("worker", 4, on_task=lambda slot, task: gate.wait(DEADLINE_S))
    alice, other = cluster.client(ALICE), cluster.client(BOB)
    first = alice.submit(alice.spec(workers=1, epochs=1))
    alice.until(first, "epoch_begin")
    second = alice.submit(alice.spec(workers=2, epochs=1))
    with pytest.raises(PolicyRefused, match="workers=3: expected at most 2, the quota of vision"):
        alice.submit(alice.spec(workers=3))
    theirs = other.submit(other.spec(workers=2, epochs=1))
    other.until(theirs, "epoch_begin")
    assert alice.until(second, "log")["text"] == (
        "The job waits for other jobs of vision to end. The quota is 2 workers at a time."
    )
    assert alice.call("Show", jobs_pb2.JobRef(job_id=second)).state == "queued"
    assert cluster.server.scheduler.workers_wanted() == 1 + 2, "more slots would not help a job that waits for others"
    gate.set()
    for client, job in ((alice, first), (alice, second), (other, theirs)):
        assert client.finish(job)[-1][1]["state"] == "succeeded"


def test_many_jobs_of_one_owner_do_not_hold_up_another_and_its_own_order_is_by_priority(start, cluster, gate):
    start(shards=2, tokens=TOKENS)
    cluster.add("worker", 1, on_task=lambda slot, task: gate.wait(DEADLINE_S))
    bob, alice = cluster.client(BOB), cluster.client(ALICE)
    running = bob.submit(bob.spec(workers=1, epochs=1))
    bob.until(running, "epoch_begin")
    waiting = [bob.submit(bob.spec(workers=1, epochs=1, priority=priority)) for priority in (0, 0, 7)]
    hers = alice.submit(alice.spec(workers=1, epochs=1))
    order = [hers, waiting[2], waiting[0], waiting[1]]
    places = {
        job: client.call("Show", jobs_pb2.JobRef(job_id=job)).place
        for job, client in ((hers, alice), *((job, bob) for job in waiting))
    }
    assert sorted(places, key=places.get) == order
    gate.set()
    for client, job in ((alice, hers), *((bob, job) for job in waiting)):
        assert client.finish(job)[-1][1]["state"] == "succeeded"
    begun = [alice.call("Show", jobs_pb2.JobRef(job_id=hers)).started_at]
    begun += [bob.call("Show", jobs_pb2.JobRef(job_id=job)).started_at for job in order[1:]]
    assert begun == sorted(begun)


def test_a_job_gives_up_workers_for_another_owner_at_an_epoch_s_end_and_gets_them_back(start, cluster):
    start(shards=2, tokens=TOKENS)
    gates = {epoch: threading.Event() for epoch in range(3)}

    def held(slot, task):
        assert gates[getattr(task, "pass")].wait(DEADLINE_S)  # the pass of the data is the epoch here

    cluster.add("worker", 2, on_task=held)
    alice, bob = cluster.client(ALICE), cluster.client(BOB)
    hers = alice.submit(alice.spec(cluster={"workers": 2, "min_workers": 1, "epoch_overlap": False}, epochs=3))
    alice.until(hers, "epoch_begin")
    his = bob.submit(bob.spec(workers=1, epochs=1))
    gates[0].set()
    ended = bob.finish(his)[-1][1]
    assert ended["state"] == "succeeded", ended
    assert alice.until(hers, "log")["text"] == "1 workers go to a job that waits, 1 train on."
    for gate in gates.values():
        gate.set()
    events = alice.finish(hers)
    assert events[-1][1]["state"] == "succeeded"
    assert not [kind for kind, _ in events if kind == "worker_lost"]
    assert sum(kind == "worker_joined" for kind, _ in events) >= 2


def test_a_job_begins_with_fewer_workers_if_it_may(start, cluster):
    client = start(shards=1, workers=1)
    job = client.submit(client.spec(cluster={"workers": 3, "min_workers": 1}, epochs=1))
    assert client.finish(job)[-1][1]["state"] == "succeeded"


def test_the_audit_log_has_who_did_what_and_no_token(job, cluster):
    cluster.client(TOKEN).call("Delete", jobs_pb2.DeleteRequest(job_id=job))
    path = cluster.state_dir / "audit.log"
    text = path.read_text()
    submitted, deleted = map(json.loads, text.splitlines())
    assert (submitted["action"], submitted["who"], submitted["role"]) == ("submit", "vision", "train")
    assert (deleted["action"], deleted["role"]) == ("delete", "admin")
    assert submitted["job"] == deleted["job"] == job
    assert submitted["from"].startswith("ipv4:127.0.0.1:")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(token in text for token in (TOKEN, ALICE))


def test_the_audit_log_is_appended_to_by_the_next_server(job, cluster):
    before = (cluster.state_dir / "audit.log").read_text()
    cluster.stop()
    client = cluster.start(tokens=TOKENS)
    client.call("Delete", jobs_pb2.DeleteRequest(job_id=job))
    after = (cluster.state_dir / "audit.log").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == len(before.splitlines()) + 1


@pytest.mark.parametrize(("token", "seen"), [(BOB, False), (ALICE, True)], ids=["another user", "its owner"])
def test_the_stranger_of_a_soak_reports_what_it_sees_of_a_job(start, cluster, tmp_path, token, seen):
    start(tokens=TOKENS)
    alice = cluster.client(ALICE)
    alice.submit(alice.spec(workers=1))
    server = SimpleNamespace(address=cluster.server.address, ca_file=None, state_dir=tmp_path / "state", listens=True)
    stranger = Stranger(server, token)
    stranger.attack()
    assert ("show of another user's job was not refused" in stranger.problems) == seen
    assert ("the list of another user had the job" in stranger.problems) == seen
    assert bool(stranger.problems) == seen
    assert stranger.refused == (set() if seen else {"show", "logs and attach", "resume", "weights", "cancel", "delete"})
