"""Interactive jobs of a server that is restarted: they wait for their client, which sends its requests again."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2
from nfdt.model.program.state import dump_state, load_state
from tests.support.fakes import WEIGHTS, of

INTERACTIVE = {"attended": True}


@pytest.fixture
def interactive(cluster):
    """Return a client and its job, which has ended epoch 0 and waits for the permission of epoch 1."""
    client = cluster.start(shards=1, workers=1)
    job = client.submit(client.spec(epochs=3, workers=1, **INTERACTIVE))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    client.until(job, "epoch_end", epoch=0)
    while client.call("Snapshot", jobs_pb2.JobRef(job_id=job)).epochs < 1 or not stored(cluster, job):
        pass
    return client, job


def stored(cluster, job):
    return cluster.server.context.store.get(job).checkpoint_epochs


def restarted(cluster, **slots):
    cluster.server.stop()  # before its slots, whose end would be that of the job
    cluster.stop()
    return cluster.start(**slots)


def finish(client, job, first):
    """Permit each epoch from ``first`` on, and return all events."""
    client.control(job, proceed=jobs_pb2.Proceed(epoch=first))
    events = []
    for kind, data in client.watch(job):
        events.append((kind, data))
        if kind == "epoch_end" and data["epoch"] >= first:
            client.control(job, proceed=jobs_pb2.Proceed(epoch=data["epoch"] + 1))
    return events


def test_the_job_waits_for_its_client_which_permits_each_epoch(cluster, interactive):
    _, job = interactive
    client = restarted(cluster, shards=1, workers=1)
    client.until(job, "worker_joined", index=0)
    client.until(job, "state", state="queued", epoch=1)
    assert client.show(job).state != "succeeded"
    events = finish(client, job, 1)
    assert events[-1] == ("state", {"state": "succeeded", "reason": None, "error": None})
    assert [data["epoch"] for data in of(events, "epoch_end")] == [0, 1, 2]
    assert not any("without its callbacks" in data["text"] for data in of(events, "log"))


def test_cursors_grow_over_the_events_that_a_loss_of_power_undoes(cluster, interactive):
    client, job = interactive
    seen = list(cluster.server.context.store.events(job))[-1].cursor
    client = restarted(cluster, shards=1, workers=1)
    kind, data = next(client.watch(job, after=seen + 1000))
    assert (kind, data["state"], data["epoch"]) == ("state", "queued", 1)


def test_the_state_between_two_epochs_is_there_before_training_goes_on(cluster, interactive):
    client, job = interactive
    before = client.call("Snapshot", jobs_pb2.JobRef(job_id=job))
    client = restarted(cluster)
    after = client.call("Snapshot", jobs_pb2.JobRef(job_id=job))
    assert after.epochs == before.epochs == 1
    np.testing.assert_array_equal(
        load_state(client.download(after.artifact)).weights, load_state(client.download(before.artifact)).weights
    )


def replace_weights(client, job):
    new = client.upload(dump_state(WEIGHTS + 100, {}, {0: np.array([50], np.float32)}))
    client.control(job, set_weights=jobs_pb2.SetWeights(artifact=new))


def test_weights_that_were_set_between_two_epochs_are_stored(cluster, interactive):
    client, job = interactive
    replace_weights(client, job)
    client = restarted(cluster)
    snapshot = client.call("Snapshot", jobs_pb2.JobRef(job_id=job))
    assert snapshot.epochs == 1
    np.testing.assert_array_equal(load_state(client.download(snapshot.artifact)).weights, WEIGHTS + 100)


def test_weights_that_are_set_before_training_goes_on_are_those_with_which_it_does(cluster, interactive):
    _, job = interactive
    client = restarted(cluster)
    replace_weights(client, job)
    cluster.add("shard")
    cluster.add("worker")
    result = of(finish(client, job, 1), "result")[0]
    np.testing.assert_array_equal(load_state(client.download(result["artifact"])).weights, WEIGHTS + 100)


def test_a_job_whose_last_epoch_was_stored_has_succeeded(cluster, interactive):
    client, job = interactive
    events = finish(client, job, 1)
    result = of(events, "result")[0]
    cluster.stop()
    store = JobStore(cluster.state_dir / "jobs.sqlite")
    store._database.execute("UPDATE jobs SET state='running', result_artifact=NULL, ended_at=NULL")
    store.close()
    client = cluster.start()
    description = client.show(job)
    assert (description.state, description.result_artifact) == ("succeeded", result["artifact"])


def test_a_queued_job_announces_that_its_requests_are_forgotten(cluster):
    client = cluster.start()
    job = client.submit(client.spec(epochs=1, workers=1, **INTERACTIVE))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    client = restarted(cluster, shards=1, workers=1)
    states = [data for kind, data in zip_until(client, job, "worker_joined") if kind == "state"]
    assert [data["state"] for data in states][:2] == ["queued", "queued"]
    assert states[1]["epoch"] == 0
    assert of(finish(client, job, 0), "state")[-1]["state"] == "succeeded"


def zip_until(client, job, last):
    """Yield the events of a job up to one of this kind."""
    for kind, data in client.watch(job):
        yield kind, data
        if kind == last:
            return
