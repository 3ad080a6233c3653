"""``nfdt trace`` of real jobs."""

from __future__ import annotations

import json
import os
from collections import defaultdict

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from nfdt_client.connection import JobsClient

import nfdt
from nfdt.cli import cli
from tests.support.scripts import ServerProcess, start_server, stop
from tests.support.spans import await_spans

EPOCHS = 2
ROUNDING_US = 1.0


def fit(cluster: ServerProcess, model: keras.Model | None = None):
    model = model or keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((640, 4), "float32"), np.ones((640, 1), "float32")
    with nfdt.session(server=cluster.address, token_file=str(cluster.token_file), workers=2):
        return model.fit(x, y, batch_size=8, epochs=EPOCHS, validation_data=(x, y), verbose=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = start_server(tmp_path_factory.mktemp("trace"), "--workers", "2", "--allow-code")
    yield cluster
    stop(cluster.process)


def jobs_of(cluster: ServerProcess) -> list[str]:
    client = JobsClient(cluster.address, cluster.token_file.read_text())
    try:
        return [job.job_id for job in client.list()]
    finally:
        client.close()


def written(cluster: ServerProcess, job_id: str, file) -> dict:
    arguments = ["trace", job_id, "-o", str(file), "--server", cluster.address]
    done = CliRunner().invoke(cli, [*arguments, "--token-file", str(cluster.token_file)])
    assert done.exit_code == 0, done.output
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    history = fit(cluster)
    await_spans(cluster, ("shard-0", "worker-0", "worker-1"))
    return history, written(cluster, jobs_of(cluster)[-1], tmp_path_factory.mktemp("file") / "trace.json")


def by_process(trace: dict) -> dict[str, list[dict]]:
    """Return the spans of each process by its name, in order of time."""
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        found[names[event["pid"]]].append(event)
    return found


def test_every_process_has_its_rows(trained):
    _, trace = trained
    found = by_process(trace)
    assert set(found) == {"job server", "shard-0", "worker-0", "worker-1"}
    assert [event["name"] for event in found["job server"]] == [f"epoch {number + 1}" for number in range(EPOCHS)]
    assert {event["name"] for event in found["shard-0"]} == {"apply", "lock wait"}
    marks = {event["name"] for event in trace["traceEvents"] if event["ph"] == "i"}
    assert {"state", "worker_joined"} <= marks


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_spans_of_a_track_do_not_overlap_and_sum_up_to_the_statistics(trained, name):
    history, trace = trained
    spans, statistics = by_process(trace)[name], history.nfdt[name]
    for track in (0, 1):
        own = [event for event in spans if event["tid"] == track]
        for before, after in zip(own, own[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING_US
    sums = {kind: sum(e["dur"] for e in spans if e["name"] == kind) / 1e6 for kind in ("compute", "exchange", "wait")}
    assert sums["compute"] == pytest.approx(statistics["compute_s"], rel=0.01)
    assert sums["exchange"] == pytest.approx(statistics["exchange_s"], rel=0.05, abs=0.02)
    assert sum(event["name"] == "compute" for event in spans) == statistics["steps"]
    tasks = sum(event["args"]["tasks"] for event in spans if event["name"] == "lease")
    assert tasks >= statistics["steps"]


def test_all_spans_are_within_the_job_and_leases_end_within_its_epochs(trained):
    _, trace = trained
    found = by_process(trace)
    error = 1e6 * max(clock["error_s"] for clock in trace["otherData"]["clocks"].values()) + ROUNDING_US
    last = found["job server"][-1]
    ends = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "i" and event["name"] == "state"]
    for name in ("worker-0", "worker-1", "shard-0"):
        assert all(event["ts"] >= -error for event in found[name])
        assert all(event["ts"] + event["dur"] <= max(ends) + 10e6 for event in found[name])
    leases = [event for name in ("worker-0", "worker-1") for event in found[name] if event["name"] == "lease"]
    # The server writes that an epoch begins beside its first leases, so these may begin before.
    assert all(e["ts"] + e["dur"] <= last["ts"] + last["dur"] + error for e in leases)


def test_an_update_is_between_the_exchanges_of_its_worker(trained):
    _, trace = trained
    found = by_process(trace)
    clocks = trace["otherData"]["clocks"]
    error = 1e6 * (clocks["shard-0"]["error_s"] + max(clocks[f"worker-{n}"]["error_s"] for n in (0, 1))) + ROUNDING_US
    for number in (0, 1):
        applied = [e for e in found["shard-0"] if e["name"] == "apply" and e["tid"] == number]
        steps = [e for e in found[f"worker-{number}"] if e["name"] == "compute"]
        assert len(applied) == len(steps)
        for step, update in zip(steps, applied, strict=True):  # the gradient exists before its update
            assert update["ts"] + error >= step["ts"] + step["dur"]


def test_a_job_that_failed_has_a_trace(cluster, tmp_path):
    script = os.getpid()

    class Fails(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, inputs):
            return self.out(inputs)

        def train_step(self, data):
            if os.getpid() != script:
                raise RuntimeError("had enough")
            return super().train_step(data)

    with pytest.raises(RuntimeError, match="had enough"):
        fit(cluster, Fails())
    await_spans(cluster, ("worker-0",))
    trace = written(cluster, jobs_of(cluster)[-1], tmp_path / "trace.json")
    assert {event["name"] for event in by_process(trace)["worker-0"]} >= {"wait"}
    marks = [event for event in trace["traceEvents"] if event["ph"] == "i" and event["name"] == "state"]
    assert marks[-1]["args"]["state"] == "failed"


def test_a_file_that_cannot_be_written_is_reported(trained, cluster, tmp_path):
    arguments = ["trace", jobs_of(cluster)[0], "-o", str(tmp_path / "no" / "t.json"), "--server", cluster.address]
    done = CliRunner().invoke(cli, [*arguments, "--token-file", str(cluster.token_file)])
    assert done.exit_code == 2
    assert "--output: expected a file that can be written" in done.output
