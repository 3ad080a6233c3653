import json
import threading

import numpy as np
import pytest

from nfdt.core.errors import UsageError
from nfdt.core.wire import jobs_pb2
from nfdt.model.program.state import dump_state, load_state
from tests.support.fakes import DEADLINE_S, WEIGHTS, of


def test_an_unattended_job_runs_to_its_end(start, cluster):
    client = start(workers=2, shards=1)
    job = client.submit(client.spec(epochs=3, samples=42))
    events = client.finish(job)
    assert [s["state"] for s in of(events, "state")] == ["queued", "starting", "running", "succeeded"]
    assert events[-1][0] == "state"
    assert [(e["epoch"], e["steps"], e["samples"]) for e in of(events, "epoch_end")] == [
        (0, 11, 42),
        (1, 11, 42),
        (2, 11, 42),
    ]
    assert [e["logs"] for e in of(events, "epoch_end")] == [{"steps": 11.0}] * 3
    trained = [task for slot in cluster.slots for task in slot.trained]
    assert sorted(trained) == list(range(33))


def test_the_result_holds_every_shard_and_the_merged_state(start, cluster):
    client = start(workers=1, shards=2)
    job = client.submit(client.spec(epochs=1, workers=1, samples=12, cluster={"workers": 1, "shards": 2}))
    result = of(client.finish(job), "result")[0]
    state = load_state(client.download(result["artifact"]))
    np.testing.assert_array_equal(state.weights, WEIGHTS)
    assert set(state.optimizer) == {0, 1, 2}
    np.testing.assert_array_equal(state.optimizer[2], WEIGHTS[4:])
    np.testing.assert_array_equal(state.untrained[0], [3.0])
    assert result["workers"]["worker-0"]["samples"] == 12
    assert client.show(job).result_artifact == result["artifact"]
    assert json.loads(client.show(job).workers_json) == result["workers"]


def test_validation_rows_are_evaluated_once(start):
    client = start(workers=2, shards=1)
    spec = client.spec(epochs=2)
    spec["validation"] = {**spec["train"], "samples": 30}
    spec["fit"] |= {"validation_freq": 2}
    events = client.finish(client.submit(spec))
    assert [e["val_logs"] for e in of(events, "epoch_end")] == [None, {"rows": 30.0}]
    assert json.loads(client.show(client.call("List", jobs_pb2.ListRequest()).jobs[0].job_id).last_logs_json) == {
        "steps": 10.0,
        "val_rows": 30.0,
    }


def test_an_interactive_job_waits_for_its_client_at_every_epoch(start):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=3, workers=1, attended=True))
    seen = []
    for kind, data in client.watch(job):
        if kind == "state" and data["state"] == "running":
            client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
        if kind == "epoch_end":
            seen.append(client.call("Snapshot", jobs_pb2.JobRef(job_id=job)).artifact)
            client.control(job, proceed=jobs_pb2.Proceed(epoch=data["epoch"] + 1))
    assert len(seen) == 3
    assert client.show(job).state == "succeeded"


def test_proceed_may_come_before_the_job_has_begun(start, cluster):
    client = start(shards=1)
    job = client.submit(client.spec(epochs=1, workers=1, attended=True))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    cluster.add("worker")
    assert of(client.finish(job), "state")[-1]["state"] == "succeeded"


def test_stopping_between_epochs_ends_the_job_with_success(start):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=100, workers=1, attended=True))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    client.until(job, "epoch_end", epoch=0)
    client.control(job, stop_training=jobs_pb2.StopTraining())
    events = client.finish(job)
    assert len(of(events, "epoch_end")) == 1
    assert events[-1][1]["state"] == "succeeded"


def test_a_learning_rate_reaches_the_shards(start, cluster):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=2, workers=1, attended=True))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    client.until(job, "epoch_end", epoch=0)
    assert cluster.slots[0].shard.flushes == 1
    client.control(job, set_learning_rate=jobs_pb2.SetLearningRate(value=0.125))
    assert cluster.slots[0].shard.learning_rate == 0.125
    with pytest.raises(UsageError, match="learning_rate"):
        client.control(job, set_learning_rate=jobs_pb2.SetLearningRate(value=-1))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=1))
    rates = [data["learning_rate"] for data in of(client.finish(job), "epoch_end")]
    assert rates == [None, 0.125]  # these shards have no optimizer whose rate they could tell


def test_weights_are_replaced_between_epochs_only(start, cluster):
    training, finish = threading.Event(), threading.Event()

    def on_task(slot, task):
        training.set()
        assert finish.wait(DEADLINE_S)

    client = start(shards=1)
    cluster.add("worker", on_task=on_task)
    job = client.submit(client.spec(epochs=2, workers=1, attended=True))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    new = client.upload(dump_state(WEIGHTS + 100, {}, {0: np.array([50], np.float32)}))
    assert training.wait(DEADLINE_S)
    with pytest.raises(UsageError, match="between two epochs"):
        client.control(job, set_weights=jobs_pb2.SetWeights(artifact=new))
    finish.set()
    client.until(job, "epoch_end", epoch=0)
    client.control(job, set_weights=jobs_pb2.SetWeights(artifact=new))
    snapshot = load_state(client.download(client.call("Snapshot", jobs_pb2.JobRef(job_id=job)).artifact))
    np.testing.assert_array_equal(snapshot.weights, WEIGHTS + 100)
    client.control(job, proceed=jobs_pb2.Proceed(epoch=1))
    result = load_state(client.download(of(client.finish(job), "result")[0]["artifact"]))
    np.testing.assert_array_equal(result.untrained[0], [60.0])


def test_events_replay_from_a_cursor_after_the_end(start):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=1, workers=1))
    events = client.finish(job)
    assert list(client.watch(job, after=2)) == events[2:]
    assert list(client.watch(job, after=len(events))) == []


def test_batches_are_fed_with_credits(start, cluster):
    client = start(workers=2, shards=1)
    spec = client.spec(epochs=2, attended=True, train={"kind": "stream", "structure": 0})
    job = client.submit(spec)
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=1))
    feed_queue = __import__("queue").SimpleQueue()
    feed_queue.put(jobs_pb2.FedBatch(job_id=job))
    most, sent = 0, {0: 0, 1: 0}
    for credit in client.stub.Feed(iter(feed_queue.get, None), timeout=DEADLINE_S):
        most = max(most, credit.batches)
        for _ in range(credit.batches):
            if sent[credit.epoch] < 15:
                step = sent[credit.epoch]
                data = f"{credit.epoch}/{step}".encode()
                batch = jobs_pb2.FedBatch(epoch=credit.epoch, step=step, samples=4, total_bytes=len(data), data=data)
                feed_queue.put(batch)
            elif sent[credit.epoch] == 15:
                feed_queue.put(jobs_pb2.FedBatch(epoch=credit.epoch, end_of_epoch=True))
            sent[credit.epoch] += 1
    feed_queue.put(None)
    events = client.finish(job)
    assert [(e["steps"], e["samples"]) for e in of(events, "epoch_end")] == [(15, 60), (15, 60)]
    fed = sorted(batch for slot in cluster.slots for batch in slot.batches)
    assert fed == sorted(f"{e}/{s}".encode() for e in range(2) for s in range(15))
    assert most <= 6


def test_two_jobs_take_turns_and_the_slots_are_used_again(start):
    client = start(workers=2, shards=1)
    jobs = [client.submit(client.spec(epochs=1)) for _ in range(3)]
    for job in jobs:
        assert client.finish(job)[-1][1]["state"] == "succeeded"


def test_a_late_worker_joins_a_running_job(start, cluster):
    waiting, joined = threading.Event(), threading.Event()

    def on_task(slot, task):
        waiting.set()
        assert joined.wait(DEADLINE_S)

    client = start(shards=1)
    cluster.add("worker", on_task=on_task)
    job = client.submit(client.spec(epochs=1, samples=400, start_timeout_s=0.1))
    assert waiting.wait(DEADLINE_S)
    (late,) = cluster.add("worker")
    client.until(job, "worker_joined", worker="worker-1")
    joined.set()
    events = client.finish(job)
    assert "1 of 2 workers" in of(events, "log")[0]["text"]
    assert events[-1][1]["state"] == "succeeded"
    assert late.assignments


def test_a_job_with_nothing_to_train_succeeds_at_once(start):
    client = start(workers=1, shards=1)
    events = client.finish(client.submit(client.spec(epochs=0, workers=1)))
    assert events[-1][1]["state"] == "succeeded"
    assert of(events, "result")


def test_jobs_are_listed_and_described(start):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=1, workers=1, name="mine"))
    client.finish(job)
    described = client.call("List", jobs_pb2.ListRequest()).jobs[0]
    assert (described.job_id, described.name, described.state, described.algorithm) == (
        job,
        "mine",
        "succeeded",
        "asgd",
    )
    assert described.ended_at >= described.submitted_at > 0


def test_the_server_describes_itself(start):
    client = start(workers=2)
    client.finish  # noqa: B018
    described = client.call("Describe", jobs_pb2.DescribeRequest())
    assert described.nfdt_version
    assert described.versions["python"]
    assert not described.allow_code
