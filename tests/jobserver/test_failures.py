import contextlib
import json
import os
import re
import sqlite3
import threading

import pytest

from nfdt.core.errors import AuthenticationFailed, PolicyRefused, ServerUnreachable, UsageError, VersionMismatch
from nfdt.core.host.machine import Memory
from nfdt.core.jobs.admission import Limits
from nfdt.core.jobs.job_record import RESTARTED
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2, workers_pb2
from nfdt.core.wire.job_token import worker_token
from nfdt.jobserver.main import ServerOptions, serve
from nfdt.jobserver.restart import MOST_RESTARTS
from tests.support.fakes import DEADLINE_S, TOKEN, VERSIONS, of


class Gate:
    """Gate that holds a worker inside its first task until the test opens it."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, slot, task):
        self.reached.set()
        assert self.open.wait(DEADLINE_S)


FED = {"workers": 1, "attended": True, "train": {"kind": "stream", "structure": 0}}


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def last(events):
    assert events[-1][0] == "state"
    return events[-1][1]


def test_an_exception_of_a_worker_fails_the_job_with_its_type_and_traceback(start, cluster):
    def raise_it(slot, task):
        raise KeyError("missing")

    client = start(shards=1)
    cluster.add("worker", on_task=raise_it)
    end = last(client.finish(client.submit(client.spec(workers=1))))
    assert end["state"] == "failed"
    assert end["error"] == {
        "worker": "worker-0",
        "exception_module": "builtins",
        "exception_type": "KeyError",
        "message": "'missing'",
        "traceback": "Traceback: in train_step",
    }
    assert "worker-0" in end["reason"]


def test_a_failed_job_s_slots_serve_the_next_one(start, cluster):
    failures = iter([ValueError("first")])

    def fail_once(slot, task):
        if error := next(failures, None):
            raise error

    client = start(shards=1)
    cluster.add("worker", 2, on_task=fail_once)
    assert last(client.finish(client.submit()))["state"] == "failed"
    assert last(client.finish(client.submit()))["state"] == "succeeded"


def test_a_killed_worker_s_tasks_are_redone_by_the_others(start, cluster, gate):
    client = start(shards=1)
    (victim,) = cluster.add("worker", on_task=gate)
    cluster.add("worker")
    job = client.submit(client.spec(epochs=1, samples=400))
    assert gate.reached.wait(DEADLINE_S)
    victim.die()
    events = client.finish(job)
    lost = of(events, "worker_lost")[0]
    assert lost["requeued"] >= 1
    assert of(events, "epoch_end")[0]["samples"] == 400
    assert last(events)["state"] == "succeeded"


def test_a_spare_slot_takes_the_place_of_a_killed_worker(start, cluster, gate):
    client = start(shards=1)
    (victim,) = cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    (spare,) = cluster.add("worker")
    victim.die()
    events = client.finish(job)
    assert [e["worker"] for e in of(events, "worker_joined")] == ["worker-0", "worker-1"]
    assert last(events)["state"] == "succeeded"
    assert len(spare.trained) == 10
    assert cluster.slots[0].assignments


def test_all_workers_gone_fails_the_job_with_the_reason(start, cluster, gate):
    client = start(shards=1)
    (victim,) = cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(epochs=1, workers=1, start_timeout_s=3.0))
    assert gate.reached.wait(DEADLINE_S)
    victim.die()
    end = last(client.finish(job))
    assert end["state"] == "failed"
    assert "All workers are gone" in end["reason"]


def test_a_job_whose_workers_may_be_replaced_no_more_does_not_wait_for_ever(start, cluster, gate, monkeypatch):
    monkeypatch.setattr("nfdt.jobserver.topologies.slot_supply.ALONE_S", 0.0)
    monkeypatch.setattr("nfdt.jobserver.job_slots.SPARE_JOINS", -2)  # of one worker: no other may take over
    client = start(shards=1)
    (victim,) = cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    cluster.add("worker")
    victim.die()
    end = last(client.finish(job))
    assert end["state"] == "failed"
    assert "as many as may have taken over. The last: worker-0 is lost: its process ended" in end["reason"]
    assert f"slot {victim.name}" in end["reason"]


def test_a_job_that_lost_its_shard_during_the_start_is_queued_again_and_the_shard_is_named(start, cluster):
    client = start(workers=1)
    (shard,) = cluster.add("shard", serves=False)
    job = client.submit(client.spec(epochs=1, workers=1))
    assert shard.assigned.wait(DEADLINE_S)
    shard.die()
    cluster.add("shard")
    events = client.finish(job)
    assert last(events)["state"] == "succeeded"
    assert any("shard-0 is gone" in (data["reason"] or "") for data in of(events, "state") if data["state"] == "queued")


def test_a_job_that_loses_every_shard_fails_in_the_end(start, cluster):
    client = start(workers=1)
    job = client.submit(client.spec(epochs=1, workers=1))
    for _ in range(MOST_RESTARTS + 1):
        (shard,) = cluster.add("shard", serves=False)
        assert shard.assigned.wait(DEADLINE_S)
        shard.die()
    end = last(client.finish(job))
    assert end["state"] == "failed"
    assert "shard-0 is gone" in end["reason"]
    assert "may be their cause" in end["reason"]


def test_a_worker_that_lost_its_shard_is_not_blamed(start, cluster):
    shard_dies = threading.Event()

    def lose_connection(slot, task):
        if not shard_dies.is_set():
            shard_dies.set()
            raise ServerUnreachable("shard 0 does not answer")

    client = start(shards=1)
    cluster.add("worker", on_task=lose_connection)
    job = client.submit(client.spec(epochs=1, workers=1))
    assert shard_dies.wait(DEADLINE_S)
    cluster.slots[0].die()
    cluster.add("shard")
    events = client.finish(job)
    assert last(events)["state"] == "succeeded"
    assert [data["shard"] for data in of(events, "shard_lost")] == ["shard-0"]
    assert "shard 0 does not answer" in of(events, "worker_lost")[0]["reason"]


def test_a_running_job_is_cancelled_and_its_slots_are_free_again(start, cluster, gate):
    client = start(shards=1)
    cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(epochs=10_000, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    client.control(job, cancel=jobs_pb2.Cancel(reason="enough"))
    end = last(client.finish(job))
    assert (end["state"], end["reason"]) == ("cancelled", "enough")
    gate.open.set()
    assert last(client.finish(client.submit(client.spec(epochs=1, workers=1))))["state"] == "succeeded"


def test_a_queued_job_is_cancelled(start):
    client = start()
    job = client.submit()
    client.control(job, cancel=jobs_pb2.Cancel())
    assert last(client.finish(job))["state"] == "cancelled"
    client.control(job, stop_training=jobs_pb2.StopTraining())


def test_without_workers_the_job_fails_and_names_the_remedy(start):
    client = start(shards=1)
    end = last(client.finish(client.submit(client.spec(start_timeout_s=0.05))))
    assert end["state"] == "failed"
    assert "nfdt worker --server" in end["reason"]
    assert "wants 2" in end["reason"]


def test_code_is_refused_where_it_is_not_allowed(start):
    client = start()
    with pytest.raises(PolicyRefused, match="--allow-code"):
        client.submit(client.spec(code=True))
    with pytest.raises(PolicyRefused, match="--allow-code"):
        client.submit(client.spec(**client.program(kind="code")))


def test_undeclared_code_is_refused_everywhere(start):
    client = start(allow_code=True)
    with pytest.raises(PolicyRefused, match="says it does not"):
        client.submit(client.spec(**client.program(kind="code")))


def test_code_of_other_versions_is_refused_naming_both(start, cluster):
    client = start(workers=1, allow_code=True)
    client.stub.Describe(jobs_pb2.DescribeRequest(), wait_for_ready=True)
    spec = client.spec(code=True, versions={**VERSIONS, "keras": "3.14.0"}, **client.program(kind="code"))
    with pytest.raises(VersionMismatch, match=r"client 3\.14\.0, worker 3\.15\.1"):
        client.submit(spec)


def test_code_meets_other_versions_only_when_workers_come(start, cluster):
    client = start(shards=1, allow_code=True)
    versions = {**VERSIONS, "python": "3.12"}
    job = client.submit(client.spec(code=True, versions=versions, start_timeout_s=0.5, **client.program(kind="code")))
    cluster.add("worker", 2)
    end = last(client.finish(job))
    assert end["error"]["exception_type"] == "VersionMismatch"
    assert "client 3.12, worker 3.11" in end["reason"]


def test_a_slot_that_ran_code_serves_its_own_session_only(start, cluster):
    client = start(shards=1, allow_code=True)
    (slot,) = cluster.add("worker")
    carries_code = client.spec(epochs=1, workers=1, code=True, **client.program(kind="code"))
    for spec in (carries_code, client.spec(epochs=1, workers=1), carries_code):
        assert last(client.finish(client.submit(spec, session="one")))["state"] == "succeeded"
    assert not slot.dismissed.is_set()
    job = client.submit(client.spec(epochs=1, workers=1), session="two")
    assert slot.dismissed.wait(DEADLINE_S)
    cluster.add("shard")
    cluster.add("worker")
    assert last(client.finish(job))["state"] == "succeeded", "it waits for slots it can have"


def test_missing_artifacts_are_named_before_anything_starts(start):
    client = start()
    spec = client.spec()
    spec["train"]["arrays"] = ["f" * 64]
    with pytest.raises(UsageError, match="f{64}"):
        client.submit(spec)
    missing = client.call("FindMissing", jobs_pb2.ArtifactNames(sha256=["f" * 64, spec["program"]]))
    assert [m.sha256 for m in missing.missing] == ["f" * 64]


@pytest.mark.parametrize(
    "manifest", [{"layout": "x"}, {"layout": [["w", [-1]]]}, {"optimizer_variables": None}, {"layout": None}]
)
def test_a_malformed_or_uncuttable_program_is_refused(start, manifest):
    client = start()
    spec = client.spec(cluster={"workers": 1, "shards": 2}, **client.program(**manifest))
    with pytest.raises(UsageError):
        client.submit(spec)


def test_a_bad_specification_is_a_usage_error(start):
    client = start()
    with pytest.raises(UsageError, match="batch_size"):
        client.submit(client.spec(fit={"epochs": 1, "batch_size": 0}))


def test_a_wrong_token_is_refused(start, cluster):
    start()
    with pytest.raises(AuthenticationFailed):
        cluster.client(token="wrong").call("List", jobs_pb2.ListRequest())


def test_more_shards_than_the_machine_should_run_are_refused_before_anything_starts(start, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    client = start()
    with pytest.raises(UsageError, match="shards=16: expected at most 8: 8 on .* which has 2 cores"):
        client.submit(client.spec(cluster={"workers": 1, "shards": 16}))
    assert not client.call("List", jobs_pb2.ListRequest()).jobs


def test_a_model_that_does_not_fit_into_memory_is_refused(start, monkeypatch):
    monkeypatch.setattr("nfdt.jobserver.context.memory", lambda: Memory(100, 100))
    client = start()
    with pytest.raises(UsageError, match="GB of memory on the server's machine"):
        client.submit()


def test_jobs_per_token_are_limited(start):
    client = start(limits=Limits(jobs_per_token=1))
    client.submit()
    with pytest.raises(PolicyRefused, match="nfdt jobs cancel"):
        client.submit()


def test_an_unknown_job_is_a_usage_error_for_every_call(start):
    client = start()
    for method in ("Show", "Snapshot"):
        with pytest.raises(UsageError, match="No job"):
            client.call(method, jobs_pb2.JobRef(job_id="nope"))
    with pytest.raises(UsageError, match="No job"):
        client.finish("nope")
    with pytest.raises(UsageError, match="No job"):
        client.control("nope", cancel=jobs_pb2.Cancel())


def test_an_embedded_job_without_its_client_is_cancelled(start):
    client = start(workers=1, shards=1, embedded=True, attend_timeout_s=0.0)
    job = client.submit(client.spec(workers=1, attended=True))
    assert "client has been gone" in _ended(client, job).reason


def _ended(client, job):
    """Description of the job once it has ended; its events are not watched, which would count as a client."""
    for _ in range(int(DEADLINE_S * 100)):
        described = client.show(job)
        if described.ended_at:
            return described
        threading.Event().wait(0.01)
    raise AssertionError(f"{job} is still {described.state}")


def test_a_remote_job_goes_on_without_its_client(start):
    client = start(workers=1, shards=1, attend_timeout_s=0.0)
    job = client.submit(client.spec(workers=1, attended=True))
    assert _ended(client, job).state == "succeeded"
    assert "without its callbacks" in of(client.finish(job), "log")[0]["text"]


def test_an_epoch_that_stands_still_goes_on_when_its_client_is_gone(start):
    client = start(workers=1, shards=1, attend_timeout_s=0.5)
    job = client.submit(client.spec(workers=1, attended=True))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0, until=1))
    assert client.until(job, "progress", pause=True)["steps"] == 1
    assert _ended(client, job).state == "succeeded"


def test_a_remote_job_that_is_fed_fails_without_its_client(start):
    client = start(workers=1, shards=1, attend_timeout_s=0.0)
    job = client.submit(client.spec(**FED))
    assert "the batches that it fed" in _ended(client, job).reason


def test_a_worker_whose_slot_is_given_up_gets_no_more_work(start, cluster, gate):
    client = start(shards=1)
    cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(epochs=1, workers=1, samples=400))
    assert gate.reached.wait(DEADLINE_S)
    run = cluster.server.scheduler.job_of(job)
    run.core.slots.workers["worker-0"].gone = True
    token = worker_token(run.core.slots.token, "worker-0")
    reply = run.workers.next(workers_pb2.NextRequest(job_id=job, worker="worker-0", job_token=token), lambda: True)
    assert reply.WhichOneof("instruction") == "leave"
    client.control(job, cancel=jobs_pb2.Cancel())


def test_an_iterator_that_raises_fails_the_job(start):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(**FED))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    messages = [jobs_pb2.FedBatch(job_id=job), jobs_pb2.FedBatch(error="ValueError: bad row")]
    list(client.stub.Feed(iter(messages), timeout=DEADLINE_S))
    assert "bad row" in last(client.finish(job))["reason"]


@pytest.mark.parametrize(("stopped_in", "expected"), [(0, "samples of epoch 1"), (1, "samples of epoch 2")])
def test_after_a_restart_what_ran_goes_on_and_what_waited_runs(cluster, gate, stopped_in, expected):
    client = cluster.start(shards=1)
    cluster.add("worker", on_task=lambda slot, task: gate(slot, task) if task.task >= 10 * stopped_in + 5 else None)
    running = client.submit(client.spec(epochs=3, cluster={"workers": 1, "epoch_overlap": False}))
    waiting = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    cluster.server.stop()
    gate.open.set()
    cluster.stop()
    client = cluster.start(shards=1)
    (slot,) = cluster.add("worker")
    events = client.finish(running)
    assert last(events)["state"] == "succeeded"
    text = next(data["text"] for data in of(events, "log") if "training goes on after" in data["text"])
    assert expected in text
    assert [(data["epoch"], data["samples"]) for data in of(events, "epoch_end")] == [(n, 40) for n in range(3)]
    assert last(client.finish(waiting))["state"] == "succeeded"
    kept = int(re.search(r"after (\d+) samples", text).group(1))
    assert len(slot.trained) == 10 * (3 - stopped_in) - kept // 4 + 10


def test_a_job_that_ends_no_epoch_between_restarts_fails(cluster, gate):
    client = cluster.start(shards=1)
    cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(epochs=1, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    gate.open.set()
    for _ in range(MOST_RESTARTS):
        cluster.stop()
        store = JobStore(cluster.state_dir / "jobs.sqlite")
        store.requeue(job, RESTARTED)
        store.transition(job, "starting")
        store.transition(job, "running")
        store.close()
    client = cluster.start()
    record = client.show(job)
    assert record.state == "failed"
    assert "may be their cause" in record.reason


def test_after_a_restart_a_job_that_its_script_fed_fails_without_it(start, cluster):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(**FED))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    client.until(job, "worker_joined")
    cluster.server.stop()
    cluster.stop()
    client = cluster.start(workers=1, shards=1, attend_timeout_s=0.0)
    assert "the batches that it fed" in _ended(client, job).reason


def test_a_state_directory_serves_one_server(cluster):
    cluster.start()
    with pytest.raises(UsageError, match="in use"):
        serve(ServerOptions(cluster.state_dir, (TOKEN,), slot_command=()))


def test_a_restart_after_the_last_epoch_ends_the_job_with_its_result(cluster):
    client = cluster.start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=2, workers=1))
    client.finish(job)
    cluster.stop()
    path = cluster.state_dir / "jobs.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database, database:  # as if the result had not been stored
        database.execute("UPDATE jobs SET state='running', result_artifact=NULL, ended_at=NULL")
        database.execute("DELETE FROM events WHERE kind='result' OR data_json LIKE '%succeeded%'")
    client = cluster.start()
    events = client.finish(job)
    assert last(events)["state"] == "succeeded"
    assert client.download(of(events, "result")[0]["artifact"])


@pytest.mark.parametrize("damaged", ["state", "data"])
def test_a_restart_looks_at_the_hashes_of_what_it_goes_on_from(cluster, gate, damaged):
    client = cluster.start(shards=1)
    cluster.add("worker", on_task=lambda slot, task: gate(slot, task) if task.task >= 15 else None)
    job = client.submit(client.spec(epochs=3, workers=1))
    assert gate.reached.wait(DEADLINE_S)
    cluster.server.stop()
    gate.open.set()
    cluster.stop()
    store = JobStore(cluster.state_dir / "jobs.sqlite")
    record = store.get(job)
    store.close()
    artifact = record.snapshot_artifact if damaged == "state" else json.loads(record.spec_json)["train"]["arrays"][0]
    path = cluster.state_dir / "artifacts" / artifact
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    client = cluster.start(workers=1, shards=1)
    events = client.finish(job)
    if damaged == "state":
        assert last(events)["state"] == "succeeded"
        assert any("from the end of epoch 1" in data["text"] for data in of(events, "log"))
    else:
        assert "1 of its artifacts are damaged or gone" in last(events)["reason"]
