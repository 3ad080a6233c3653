"""Decisions of the callbacks of a detached job, as its server carries them out."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from nfdt.core.clock import SystemClock
from nfdt.core.errors import PolicyRefused
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.wire import jobs_pb2
from nfdt.core.work.instructions import CallbackDecision
from nfdt.jobserver.job_core import ClientControl, JobCore
from nfdt.jobserver.mailbox import Mailbox
from nfdt.jobserver.training_loop import DecisionHandler
from nfdt.model.program.state import dump_state, load_state
from tests.support.fakes import DEADLINE_S, of

SAMPLES, STEPS = 12, 3  # batches of 4


def spec_of(client, epochs, **callbacks):
    members = [{"kind": "EarlyStopping"}]
    text = {"members": members, "state": json.dumps("at first"), "learning_rate": 0.5, **callbacks}
    return client.spec(epochs=epochs, workers=1, samples=SAMPLES, callbacks=text)


class Deciding:
    """Worker's side: it returns the decision of each epoch, and records what it was asked."""

    def __init__(self, **decisions):
        self.decisions, self.asked = decisions, []

    def __call__(self, summarise):
        self.asked.append((summarise.epoch, summarise.steps, summarise.callbacks))
        after = json.dumps(f"after {summarise.epoch}")
        return {
            **vars(CallbackDecision(after, learning_rate=0.5)),
            **self.decisions.get(f"epoch_{summarise.epoch}", {}),
        }


def run(start, cluster, epochs, **decisions):
    client, deciding = start(shards=1), Deciding(**decisions)
    cluster.add("worker", decide=deciding)
    job = client.submit(spec_of(client, epochs))
    return client, job, client.finish(job), deciding


def untrained(client, artifact):
    """Return the state that the worker counts: its steps so far."""
    return load_state(client.download(artifact)).untrained[0].tolist()


def test_each_epoch_gets_the_state_that_the_one_before_has_left(start, cluster):
    _, _, events, deciding = run(start, cluster, 3)
    assert deciding.asked == [
        (0, STEPS, '"at first"'),
        (1, STEPS, '"after 0"'),
        (2, STEPS, '"after 1"'),
    ]
    assert events[-1][1]["state"] == "succeeded"


def test_a_decision_to_stop_ends_the_job_with_success(start, cluster):
    client, job, events, _ = run(start, cluster, 100, epoch_1={"stop": True, "messages": ["Epoch 2: early stopping"]})
    assert [data["epoch"] for data in of(events, "epoch_end")] == [0, 1]
    assert events[-1][1]["state"] == "succeeded"
    assert {"worker": None, "level": "info", "text": "Epoch 2: early stopping"} in of(events, "log")
    assert untrained(client, client.show(job).result_artifact) == [2 * STEPS]
    assert client.show(job).resumable_from == 0


def test_a_learning_rate_reaches_the_shards_before_the_next_epoch(start, cluster):
    seen, deciding = [], Deciding(epoch_0={"learning_rate": 0.25}, epoch_1={"learning_rate": 0.125})
    client = start(shards=1)
    cluster.add("worker", decide=deciding, on_task=lambda slot, task: seen.append(cluster.slots[0].shard.learning_rate))
    assert client.finish(client.submit(spec_of(client, 3)))[-1][1]["state"] == "succeeded"
    assert seen[-2 * STEPS :] == [0.25] * STEPS + [0.125] * STEPS
    assert set(seen[: -2 * STEPS]) == {0.5}, "the second epoch may have begun before the decision on the first"


def test_a_learning_rate_that_is_no_number_fails_the_job(start, cluster):
    *_, events, _ = run(start, cluster, 2, epoch_0={"learning_rate": -1.0})
    assert events[-1][1]["state"] == "failed"
    assert "learning_rate: expected a number >= 0" in events[-1][1]["reason"]


def test_the_weights_of_a_kept_epoch_are_the_result(start, cluster):
    client, job, _, _ = run(
        start,
        cluster,
        5,
        epoch_0={"kept": [0]},
        epoch_1={"kept": [1]},
        epoch_2={"kept": [1]},
        epoch_3={"kept": [1], "restored": 1, "stop": True},
    )
    shown = client.show(job)
    assert untrained(client, shown.result_artifact) == [2 * STEPS]
    state = load_state(client.download(shown.result_artifact))
    np.testing.assert_array_equal(state.optimizer[0], 7)  # the optimizer goes on with its own variables
    record = cluster.server.context.store.get(job)
    assert record.states == {shown.result_artifact}
    files = {file.name for file in (cluster.state_dir / "artifacts").iterdir()}
    assert files == {shown.result_artifact, *json.loads(record.spec_json)["artifacts"], *of_data(record)}


def of_data(record):
    return json.loads(record.spec_json)["train"]["arrays"]


def test_an_epoch_that_is_not_kept_is_not_restored(start, cluster):
    client, job, events, _ = run(start, cluster, 2, epoch_1={"restored": 7, "kept": [7]})
    assert events[-1][1]["state"] == "succeeded"
    assert untrained(client, client.show(job).result_artifact) == [2 * STEPS]


@pytest.mark.parametrize("lost", [False, True], ids=["shards live", "shards lost meanwhile"])
def test_shards_that_are_lost_after_a_restored_epoch_have_its_weights_too(lost, tmp_path):
    artifacts, mailbox = ArtifactStore(tmp_path), Mailbox(SystemClock())
    kept = artifacts.put(dump_state(np.full(3, 7.0, np.float32), {}, {}))
    slots, written, stored = SimpleNamespace(incarnation=0), [], []

    def renew(incarnation: int) -> bool:
        if lost and not stored:
            slots.incarnation = 1
        stored.append(incarnation)
        return slots.incarnation == incarnation

    training = SimpleNamespace(
        composer=SimpleNamespace(replace=lambda name: written.append(load_state(artifacts.path(name)).weights[0])),
        recovery=SimpleNamespace(renew=renew, outdate=lambda: None, roll_back=lambda why: None),
    )
    spec = SimpleNamespace(callbacks=CallbacksSpec(members=(), state="", kept={0: kept}), fit=SimpleNamespace(epochs=9))
    server = SimpleNamespace(artifacts=artifacts)
    core = JobCore(server, "job", slots, None, set(), None, mailbox, None, ClientControl(False, 0.0))
    core.topology = SimpleNamespace(spec=spec)
    DecisionHandler(core, training).carry_out(1, CallbackDecision("", kept=(0,), restored=0))
    assert written == [7.0] * (1 + lost)
    assert stored == [0, 1][: 1 + lost]


def test_a_restarted_server_goes_on_with_the_callbacks_of_the_last_epoch(cluster):
    client, held = cluster.start(shards=1), threading.Event()

    def hold(slot, task):
        if len(slot.trained) >= 2 * STEPS:
            held.set()
            assert slot.released.wait(DEADLINE_S)

    deciding = Deciding(epoch_0={"kept": [0]}, epoch_1={"kept": [0], "learning_rate": 0.25})
    cluster.add("worker", decide=deciding, on_task=hold)
    job = client.submit(spec_of(client, 4) | {"cluster": {"workers": 1, "epoch_overlap": False}})
    assert held.wait(DEADLINE_S)
    cluster.server.stop()
    cluster.stop()
    client = cluster.start(shards=1)
    seen, deciding = [], Deciding(epoch_2={"kept": [0], "restored": 0, "stop": True})
    cluster.add("worker", decide=deciding, on_task=lambda slot, task: seen.append(cluster.slots[0].shard.learning_rate))
    assert client.finish(job)[-1][1]["state"] == "succeeded"
    assert deciding.asked == [(2, STEPS, '"after 1"')]
    assert set(seen) == {0.25}
    assert untrained(client, client.show(job).result_artifact) == [STEPS]


def test_a_schedule_is_code_that_the_job_has_to_declare(start, cluster):
    client = start(shards=1, workers=1)
    code = client.upload(b"pickle")
    with pytest.raises(PolicyRefused, match="takes none"):
        client.submit(spec_of(client, 1, members=[{"kind": "LearningRateScheduler", "code": code}]))


def test_a_database_of_an_earlier_version_gets_the_column(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    store.add("a", "{}", session="", owner="")
    store._database.execute("ALTER TABLE jobs DROP COLUMN callbacks_json")
    store.close()
    again = JobStore(tmp_path / "jobs.sqlite")
    assert again.get("a").kept == set()
    again.close()


def test_a_resumed_job_goes_on_with_the_callbacks_of_the_one_before(start, cluster):
    client, reached = start(shards=1), threading.Event()

    def hold(slot, task):
        if len(slot.trained) >= 2 * STEPS and not reached.is_set():
            reached.set()
            assert slot.released.wait(DEADLINE_S)

    deciding = Deciding(epoch_1={"kept": [1]}, epoch_2={"kept": [1]}, epoch_3={"kept": [1], "restored": 1})
    cluster.add("worker", decide=deciding, on_task=hold)
    job = client.submit(spec_of(client, 4))
    assert reached.wait(DEADLINE_S)
    client.control(job, cancel=jobs_pb2.Cancel(reason="enough"))
    assert client.finish(job)[-1][1]["state"] == "cancelled"
    cluster.add("worker", decide=deciding)
    again = client.call("Resume", jobs_pb2.JobRef(job_id=job)).job_id
    assert client.finish(again)[-1][1]["state"] == "succeeded"
    assert deciding.asked[2:] == [(2, STEPS, '"after 1"'), (3, STEPS, '"after 2"')]
    assert untrained(client, client.show(again).result_artifact) == [2 * STEPS]
