"""Rings and groups whose ranks are worker slots of a server, with real Horovod on one machine."""

from __future__ import annotations

import psutil
import pytest
from nfdt_client.connection import JobsClient
from nfdt_client.handle import JobHandle

from nfdt.cli.trace import trace_of
from tests.support.scripts import DIGITS, answer, descendants, start_server, stop
from tests.support.spans import await_spans

pytestmark = pytest.mark.horovod

FAILS = """
import hfdt, os

class Fails(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(10, "softmax")
    def call(self, inputs):
        return self.out(inputs)
    def train_step(self, data):
        print("rank", os.environ.get("HOROVOD_RANK"), "begins")
        if os.environ.get("HOROVOD_RANK") == "1":
            raise RuntimeError("rank 1 has had enough")
        return super().train_step(data)

with hfdt.session(workers=2):
    model = Fails()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(x, y, verbose=0)
"""
EQUALS = """
import hfdt
def train(model):
    return model.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0)
def plain():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model
size = 16
with hfdt.session(workers=2):
    ranks = plain()
    history = train(ranks)
size = 32
alone = plain()
train(alone)
pairs = zip(ranks.get_weights(), alone.get_weights())
print(json.dumps(dict(
    difference=max(float(np.abs(a - b).max()) for a, b in pairs), **history.nfdt["worker-0"],
)))
"""
KILLED = """
import hfdt
from nfdt.core.errors import JobFailed
try:
    with hfdt.session(workers=2, emulate={"fail": "1@20"}):
        build().fit(x, y, epochs=50, verbose=0)
except JobFailed as error:
    print(json.dumps(dict(text=str(error))))
"""
OUTLIVES = """
import hfdt
def train(model, size):
    return model.fit(x[:1003], y[:1003], batch_size=size, epochs=3, shuffle=False, verbose=0)
def plain():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model
elastic = dict(min_workers=2, commit_steps=3, host_cooldown_s=1)
with hfdt.session(workers=2, **elastic, emulate={{"fail": "{rank}@21"}}):
    ranks = plain()
    history = train(ranks, 32)
alone = plain()
train(alone, 64)
pairs = zip(ranks.get_weights(), alone.get_weights())
print(json.dumps(dict(
    difference=max(float(np.abs(a - b).max()) for a, b in pairs), **history.nfdt["worker-0"],
)))
"""
TOO_MANY = """
import hfdt
from nfdt.core.errors import UsageError
try:
    with hfdt.session(workers=3):
        build().fit(x, y, verbose=0)
except UsageError as error:
    print(json.dumps(dict(text=str(error))))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_server(tmp_path_factory.mktemp("slots"), "--workers", "2", "--allow-code")
    yield server
    stop(server.process)


def test_ranks_in_slots_equal_one_process_with_the_global_batch(run_script, server):
    got = answer(run_script(DIGITS + EQUALS, **server.env()))
    assert got["ranks"] == 2
    assert got["difference"] < 2e-5
    assert sum(rank["samples"] for rank in got["by_rank"]) == got["samples"]
    assert {rank["steps"] for rank in got["by_rank"]} == {got["steps"]}
    assert len({rank["pid"] for rank in got["by_rank"]}) == 2
    trace = trace_of(await_spans(server, ("rank-0", "rank-1"), job=0), [])
    for rank in (0, 1):
        number = next(e["pid"] for e in trace["traceEvents"] if e["args"].get("name") == f"rank-{rank}")
        steps = [e for e in trace["traceEvents"] if e["pid"] == number and e["name"] == "step"]
        assert len(steps) == got["steps"]
        seconds = got["by_rank"][rank]["compute_s"]
        assert sum(e["dur"] for e in steps) / 1e6 == pytest.approx(seconds, rel=0.01)
    assert not descendants(server.process.pid, "mpirun")


def test_an_exception_of_a_rank_reaches_the_script(run_script, server):
    done = run_script(DIGITS + FAILS, **server.env())
    assert done.returncode == 1
    assert "RuntimeError: rank 1 has had enough" in done.stderr
    assert "Raised on rank-1 of job" in done.stderr
    assert "in train_step" in done.stderr
    client = JobsClient(server.address, server.token_file.read_text())
    job = JobHandle(client.list()[-1].job_id, client)
    printed = {event.data["worker"]: event.data["text"] for event in job.recorded() if event.kind == "log"}
    client.close()
    assert printed["rank-1"] == "rank 1 begins"


def test_a_rank_that_is_killed_ends_the_job_and_is_named(run_script, server):
    before = {p.pid for p in descendants(server.process.pid)}
    text = answer(run_script(DIGITS + KILLED, **server.env()))["text"]
    assert "ring of 2 ranks ended: rank 1 is lost" in text
    assert "SIGKILL" in text
    lost = [psutil.Process(pid) for pid in before if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs([p for p in lost if p.name().startswith("nfdt worker")], timeout=30)
    assert alive == [], "no process that has been a rank takes another job"


@pytest.mark.parametrize("rank", [1, 0], ids=["a rank", "the leader"])
def test_an_elastic_ring_that_loses_a_rank_and_gets_a_free_slot_equals_one_process(run_script, server, rank):
    got = answer(run_script(DIGITS + OUTLIVES.format(rank=rank), **server.env()))
    assert got["difference"] < 2e-5
    assert (got["ranks"], got["resets"], got["samples"]) == (2, 1, 3 * 1003)
    assert got["redone_steps"] == 1  # the 21st step is the second after a commit
    assert not descendants(server.process.pid, "horovodrun")


def test_more_ranks_than_slots_are_refused(run_script, server):
    text = answer(run_script(DIGITS + TOO_MANY, **server.env()))["text"]
    assert "workers=3: expected at most 2" in text
    assert "nfdt worker" in text
