"""Job whose epoch pauses for its client, over real gRPC: its state is read and replaced meanwhile."""

import numpy as np

from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.wire import jobs_pb2
from nfdt.model.program.state import dump_state, load_state
from tests.support.fakes import WEIGHTS, of


def counted(state):
    return float(load_arrays(state.metrics)["sum/0"][0])


class Steps:
    """Client that runs a job one step at a time; ``at`` is called with (client, job, steps) at each halt."""

    def __init__(self, start, at, **spec):
        self.client = start(workers=1, shards=1)
        self.job = self.client.submit(self.client.spec(epochs=1, workers=1, samples=20, attended=True, **spec))
        self.events = []
        self.client.control(self.job, proceed=jobs_pb2.Proceed(epoch=0, until=1))
        for kind, data in self.client.watch(self.job):
            self.events.append((kind, data))
            if kind == "progress" and "pause" in data:
                at(self, data["steps"])
                self.client.control(self.job, proceed=jobs_pb2.Proceed(epoch=0, until=data["steps"] + 1))

    def snapshot(self):
        return self.client.call("Snapshot", jobs_pb2.JobRef(job_id=self.job)).artifact

    def state(self):
        return load_state(self.client.download(self.snapshot()))


def test_the_client_is_asked_after_every_step_and_sees_its_state(start, cluster):
    seen = []

    def look(steps, done):
        state = steps.state()
        trained = len(next(slot for slot in cluster.slots if slot.role == "worker").trained)
        seen.append((done, trained, counted(state), float(state.untrained[0][0])))

    steps = Steps(start, look)
    assert seen == [(n, n, float(n), float(n)) for n in range(1, 6)]
    assert of(steps.events, "state")[-1]["state"] == "succeeded"


def test_a_state_of_the_middle_of_an_epoch_is_kept_until_the_next_one(start, cluster):
    names = []

    def look(steps, done):
        names.append(steps.snapshot())
        on_disk = {file.name for file in (cluster.state_dir / "artifacts").iterdir()}
        assert names[-1] in on_disk
        assert not set(names[:-1]) & on_disk

    Steps(start, look)
    assert len(set(names)) == 5


def test_the_result_stays_where_it_equals_the_last_state_that_was_read(start):
    steps = Steps(start, lambda steps, done: steps.snapshot())
    result = of(steps.events, "result")[0]["artifact"]
    steps.snapshot()
    assert counted(load_state(steps.client.download(result))) == 5.0


def test_weights_and_state_are_replaced_where_it_stands_still(start):
    def replace(steps, done):
        if done == 3:
            new = steps.client.upload(dump_state(WEIGHTS + 100, {}, {0: np.array([50], np.float32)}))
            steps.client.control(steps.job, set_weights=jobs_pb2.SetWeights(artifact=new))
            assert steps.state().weights[0] == WEIGHTS[0] + 100

    steps = Steps(start, replace)
    state = load_state(steps.client.download(of(steps.events, "result")[0]["artifact"]))
    np.testing.assert_array_equal(state.weights, WEIGHTS + 100)
    np.testing.assert_array_equal(state.untrained[0], [52.0])


def test_a_learning_rate_is_set_before_the_next_step(start, cluster):
    rates = []

    def note(slot, task):
        rates.append(next(other for other in cluster.slots if other.role == "shard").shard.learning_rate)

    client = start(shards=1)
    cluster.add("worker", on_task=note)
    job = client.submit(client.spec(epochs=1, workers=1, samples=20, attended=True))
    client.control(job, set_learning_rate=jobs_pb2.SetLearningRate(value=0.0))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0, until=1))
    for kind, data in client.watch(job):
        if kind == "progress" and "pause" in data:
            client.control(job, set_learning_rate=jobs_pb2.SetLearningRate(value=float(data["steps"])))
            client.control(job, proceed=jobs_pb2.Proceed(epoch=0, until=data["steps"] + 1))
    assert rates == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_stopping_after_a_step_trains_no_other(start, cluster):
    client = start(workers=1, shards=1)
    job = client.submit(client.spec(epochs=5, workers=1, samples=20, attended=True))
    client.control(job, proceed=jobs_pb2.Proceed(epoch=0, until=1))
    for kind, data in client.watch(job):
        if kind == "progress" and data.get("pause"):
            if data["steps"] == 2:
                client.control(job, stop_training=jobs_pb2.StopTraining())
            else:
                client.control(job, proceed=jobs_pb2.Proceed(epoch=0, until=2))
    trained = [task for slot in cluster.slots for task in slot.trained]
    assert trained == [0, 1]
    assert client.show(job).state == "succeeded"
