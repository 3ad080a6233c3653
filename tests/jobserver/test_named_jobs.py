"""Jobs with names, over real gRPC: a script that submits its program again finds its job."""

from __future__ import annotations

import json
import threading

import pytest

from nfdt.core.errors import JobTaken, UsageError
from nfdt.core.events import MAX_LOGS_BYTES
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2
from tests.support.fakes import DEADLINE_S, of

INTERACTIVE = {"attended": True}
TWO_OWNERS = ("vision train vision-train-token", "speech train speech-train-token")


def submit(client, spec, name="digits", session="a"):
    request = jobs_pb2.SubmitRequest(spec_json=json.dumps(spec), session=session, name=name)
    return client.call("Submit", request)


def changed(spec, **fit):
    """Return a specification of another program."""
    return {**spec, "fit": {**spec["fit"], **fit}}


class Attached:
    """Client whose callbacks the job waits for."""

    def __init__(self, client, job, session, after=0):
        request = jobs_pb2.WatchRequest(job_id=job, session=session, after=after)
        self._call = client.stub.Watch(request, timeout=DEADLINE_S)
        self.events = ((event.kind, json.loads(event.data_json)) for event in self._call)

    def until(self, kind, **fields):
        for found, data in self.events:
            if found == kind and all(data.get(name) == value for name, value in fields.items()):
                return data
        raise AssertionError(f"no {kind} {fields}")

    def leave(self):
        self._call.cancel()


def permit(client, job, epoch):
    client.control(job, proceed=jobs_pb2.Proceed(epoch=epoch))


def cancelled_after(client, job, epochs):
    """Let an interactive job train so many epochs, then cancel it."""
    permit(client, job, epochs - 1)
    client.until(job, "epoch_end", epoch=epochs - 1)
    while client.show(job).resumable_from < epochs:
        client.control(job, cancel=jobs_pb2.Cancel(reason="enough"))
        client.finish(job)


def test_the_same_program_finds_its_job_whatever_its_weights_and_seed_are(start):
    client = start()
    spec = client.spec()
    first = submit(client, spec)
    again = submit(client, changed({**spec, **client.program(versions={"python": "3.12"})}, seed=7), session="b")
    assert again.job_id == first.job_id
    assert (first.cursor, again.cursor) == (0, 1)
    assert client.show(first.job_id).given_name == "digits"


def test_a_job_that_has_succeeded_is_found(start):
    client = start(workers=2, shards=1)
    spec = client.spec()
    first = submit(client, spec)
    events = client.finish(first.job_id)
    again = submit(client, spec)
    assert again.job_id == first.job_id
    assert again.cursor >= len(events)


def test_another_program_is_refused_with_what_differs(start):
    client = start()
    spec = client.spec(epochs=2)
    job = submit(client, spec).job_id
    with pytest.raises(UsageError, match=rf"epochs \(2 in the job, 3 in the script\).*nfdt jobs cancel {job}"):
        submit(client, changed(spec, epochs=3))
    with pytest.raises(UsageError, match="the optimizer"):
        submit(client, {**spec, **client.program(optimizer={"config": {"learning_rate": 0.1}})})


@pytest.mark.parametrize("name", ["", "-x", "a/b", "x" * 101, "a b"])
def test_a_name_that_no_command_line_takes_is_refused(start, name):
    client = start()
    if name:
        with pytest.raises(UsageError, match="expected a name"):
            submit(client, client.spec(), name=name)
    else:
        assert client.show(submit(client, client.spec(), name=name).job_id).given_name == ""


def test_a_script_that_begins_with_a_later_epoch_is_the_same_program(start):
    client = start()
    spec = client.spec(epochs=5)
    job = submit(client, spec).job_id
    assert submit(client, changed(spec, initial_epoch=2)).job_id == job


def test_names_belong_to_owners(cluster):
    first = cluster.start(tokens=TWO_OWNERS).__class__
    vision, speech = (first(cluster.server.address, line.split()[2]) for line in TWO_OWNERS)
    try:
        assert submit(vision, vision.spec()).job_id != submit(speech, speech.spec(epochs=9)).job_id
    finally:
        vision.close()
        speech.close()


def test_a_job_that_was_cancelled_goes_on_from_its_last_state_with_its_epochs(start):
    client = start(workers=1, shards=1)
    spec = client.spec(epochs=3, workers=1, **INTERACTIVE)
    before = submit(client, spec).job_id
    cancelled_after(client, before, 2)
    reply = submit(client, spec)
    assert reply.job_id != before
    permit(client, reply.job_id, 2)
    events = client.finish(reply.job_id)
    kinds = [kind for kind, _ in events[: reply.cursor]]
    assert kinds == ["epoch_begin", "epoch_end", "epoch_begin", "epoch_end"]
    assert [data["epoch"] for data in of(events, "epoch_end")] == [0, 1, 2]
    assert any("from the end of epoch 2" in data["text"] for data in of(events, "log"))
    assert [client.show(job).given_name for job in (before, reply.job_id)] == ["", "digits"]


def test_a_cancelled_job_frees_its_name_for_another_program(start):
    client = start(workers=1, shards=1)
    spec = client.spec(epochs=3, workers=1, **INTERACTIVE)
    before = submit(client, spec).job_id
    cancelled_after(client, before, 1)
    reply = submit(client, changed(spec, epochs=4))
    assert reply.cursor == 0
    text = client.until(reply.job_id, "log")["text"]
    assert "begins anew, because its program differs: epochs" in text


def test_a_job_that_is_resumed_by_hand_keeps_its_name_and_its_epochs(start):
    client = start(workers=1, shards=1)
    before = submit(client, client.spec(epochs=3, workers=1, **INTERACTIVE)).job_id
    cancelled_after(client, before, 1)
    job = client.call("Resume", jobs_pb2.JobRef(job_id=before)).job_id
    assert [data["epoch"] for data in of(client.finish(job), "epoch_end")] == [0, 1, 2]
    assert client.show(job).given_name == "digits"


def test_a_second_script_is_refused_until_the_first_is_gone(start):
    client = start()
    spec = client.spec(**INTERACTIVE)
    job = submit(client, spec, session="a").job_id
    first = Attached(client, job, "a")
    first.until("state")
    reconnected = Attached(client, job, "a")
    reconnected.until("state")
    first.leave()
    with pytest.raises(JobTaken, match="one script at a time"):
        submit(client, spec, session="b")
    late = client.stub.Watch(jobs_pb2.WatchRequest(job_id=job, session="b"), timeout=DEADLINE_S)
    with pytest.raises(Exception, match="one script at a time"):
        next(late)
    client.until(job, "state")  # a client that only looks on
    reconnected.leave()
    for _ in range(10_000):  # the server notices the end of the first script's stream
        try:
            assert submit(client, spec, session="b").job_id == job
        except JobTaken:
            continue
        return
    raise AssertionError("the job is taken for ever")


def test_a_detached_job_waits_for_the_script_that_attaches_to_it(start, cluster):
    attached = threading.Event()
    client = start(shards=1)
    cluster.add("worker", on_task=lambda slot, task: attached.wait(DEADLINE_S))
    job = submit(client, client.spec(epochs=3, workers=1)).job_id
    client.until(job, "epoch_begin", epoch=0)
    script = Attached(client, job, "a")
    script.until("epoch_begin", epoch=0)
    attached.set()
    script.until("epoch_end", epoch=0)
    control = cluster.server.scheduler.job_of(job).core.control
    assert control.interactive
    assert not control.permits(1)
    permit(client, job, 2)
    script.until("state", state="succeeded")


def test_numbers_of_a_validation_by_the_script_are_events(start):
    client = start()
    job = submit(client, client.spec(**INTERACTIVE)).job_id
    client.control(job, validated=jobs_pb2.Validated(epoch=1, logs_json='{"loss": 0.5}'))
    assert client.until(job, "validated") == {"epoch": 1, "val_logs": {"loss": 0.5}}
    for text in ("[1]", "nonsense", json.dumps({"x": "y" * MAX_LOGS_BYTES})):
        with pytest.raises(UsageError, match="JSON object"):
            client.control(job, validated=jobs_pb2.Validated(epoch=1, logs_json=text))


def test_a_database_of_an_earlier_version_gets_the_names(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    store.add("a", "{}", session="", owner="me")
    store._database.executescript("DROP INDEX names; ALTER TABLE jobs DROP COLUMN name")
    store.close()
    store = JobStore(tmp_path / "jobs.sqlite")
    assert store.get("a").name is None
    assert store.named("me", "x") is None
    store.close()
