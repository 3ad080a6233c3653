"""Shards that are killed in the middle of an epoch: the job goes on from their newest snapshot."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import pytest
from nfdt_client.connection import JobsClient

from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.model.program.state import load_state
from tests.support.scripts import DEADLINE_S, DIGITS, start_server, start_workers, stop, submitted

pytestmark = pytest.mark.processes

ROWS = 1797
FIT = "build(keras.optimizers.Adam(0.01)).fit(x, y, batch_size=32, epochs=3, shuffle=True, verbose=0)"
PLAIN = DIGITS.replace("        keras.layers.BatchNormalization(),\n        keras.layers.Dropout(0.1),\n", "")
TABLES = """
import keras
import nfdt
import numpy as np

keras.utils.set_random_seed(1)
x = np.random.default_rng(2).integers(0, 20_000, (1797, 4)).astype("int32")
y = (x.sum(1) % 2).astype("float32")
table = nfdt.Embedding(20_000, 16)
model = keras.Sequential([keras.Input((4,)), table, keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adagrad(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(x, y, batch_size=32, epochs=3, shuffle=True, verbose=0)
"""
LOCAL = ("local-ddc", "diloco")
OPTIONS = ("--workers", "2", "--shards", "2", "--set", "emulate.step_ms=30", "--set", "snapshot_s=0.3")


@pytest.fixture
def cluster(tmp_path):
    cluster = start_server(tmp_path)
    workers = start_workers(cluster, 2)
    yield cluster
    stop(workers, cluster.process)


def submit(cluster, directory, preset: str, *options: str, source: str = PLAIN + FIT) -> AbstractContextManager[str]:
    """Submit a job; give its name."""
    script = directory / "script.py"
    script.write_text(source)
    return submitted(cluster, "--algorithm", preset, *OPTIONS, *options, str(script))


def follow(cluster, job: str, kills: Sequence[tuple[int, int]] = ()) -> list:
    """Return the events of a job; kill a shard at each (epoch, step), once it is reached and no shard is away."""
    jobs, events, left = JobsClient(cluster.address, cluster.token_file.read_text()), [], list(kills)
    try:
        for event in jobs.watch(job):
            events.append(event)
            whole = len(of(events, "shards_restored")) == len(kills) - len(left)
            if left and whole and event.kind == "progress" and reached(event) >= left[0]:
                left.pop(0)
                slot = [slot for slot in jobs.slots() if slot.role == "shard" and slot.job_id == job][-1]
                os.kill(slot.pid, signal.SIGKILL)
    finally:
        jobs.close()
    assert events[-1].data["state"] == "succeeded", events[-1]
    assert not left
    return events


def reached(event) -> tuple[int, int]:
    return event.data["epoch"], event.data["steps"]


def of(events, kind: str) -> list[dict]:
    return [event.data for event in events if event.kind == kind]


def weights(cluster, events) -> np.ndarray:
    return load_state(cluster.state_dir / "artifacts" / of(events, "result")[0]["artifact"]).weights


@pytest.mark.feature("A shard is killed", area="Failures")
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(PLAIN + FIT, id="dense", marks=pytest.mark.long),
        pytest.param(TABLES, id="tables that shards make"),
    ],
)
def test_bsp_reaches_the_same_bits_as_without_the_losses(cluster, tmp_path, source):
    with submit(cluster, tmp_path, "bsp", source=source) as job:
        expected = weights(cluster, follow(cluster, job))
    with submit(cluster, tmp_path, "bsp", source=source) as job:
        events = follow(cluster, job, [(0, 20), (1, 30)])
    assert len(of(events, "shards_restored")) == 2
    assert [data["samples"] for data in of(events, "epoch_end")] == [ROWS] * 3
    np.testing.assert_array_equal(weights(cluster, events), expected)


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("preset", [DEFAULT_PRESET, *(pytest.param(p, marks=pytest.mark.long) for p in LOCAL)])
def test_an_asynchronous_or_local_job_trains_again_what_the_snapshot_lacks(cluster, tmp_path, preset):
    with submit(cluster, tmp_path, preset) as job:
        events = follow(cluster, job, [(0, 30)])
    (lost,), (restored,) = of(events, "shard_lost"), of(events, "shards_restored")
    assert lost["shard"] in ("shard-0", "shard-1")
    assert "SIGKILL" in lost["reason"]
    assert [data["samples"] for data in of(events, "epoch_end")] == [ROWS] * 3
    workers = of(events, "result")[0]["workers"].values()
    trained = sum(worker["samples"] for worker in workers)
    assert 3 * ROWS + restored["redone_samples"] <= trained
    assert len(of(events, "worker_joined")) == 2, "the workers keep their processes"
