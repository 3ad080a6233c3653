"""A job server that is killed and started again: its jobs go on with the workers that are still there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3

import pytest
from nfdt_client.connection import JobsClient

from nfdt.core.specs.job import EpochProgress
from tests.support.fakes import Client
from tests.support.scripts import DEADLINE_S, DIGITS, start_server, start_workers, stop, submitted

pytestmark = pytest.mark.processes

EPOCHS = 2
ROWS = 1797
SCRIPT = DIGITS + f"build().fit(x, y, batch_size=32, epochs={EPOCHS}, verbose=0)"


def stored_progress(cluster, job: str) -> EpochProgress:
    """Return the part of an epoch that the newest snapshot contains."""
    with contextlib.closing(sqlite3.connect(cluster.state_dir / "jobs.sqlite")) as database:
        (text,) = database.execute("SELECT snapshot_json FROM jobs WHERE job_id=?", (job,)).fetchone()
    return EpochProgress.model_validate_json(text) if text else EpochProgress(epoch=0)


def stopped_in_an_epoch(cluster, job: str) -> EpochProgress | None:
    """Stop the server's process; None, and it runs again, if its newest snapshot is of an epoch's end."""
    os.kill(cluster.process.pid, signal.SIGSTOP)
    progress = stored_progress(cluster, job)
    if 0 < progress.samples < ROWS:
        return progress
    os.kill(cluster.process.pid, signal.SIGCONT)
    return None


@pytest.mark.feature("The server is killed and started again", area="Failures")
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param((), id="default"),
        pytest.param(("--algorithm", "local-ddc", "--set", "local_steps=4"), id="local", marks=pytest.mark.long),
    ],
)
def test_a_detached_job_goes_on_in_the_middle_of_its_epoch(tmp_path, algorithm):
    first = start_server(tmp_path)
    workers = start_workers(first, 2)
    token = first.token_file.read_text()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Epochs of 11 s: snapshots take at most 2 % of the time, and on a busy machine one of 1.4 s had none in its middle.
    options = ("--workers", "2", "--set", "emulate.step_ms=400", "--set", "snapshot_s=0.3")
    with submitted(first, *algorithm, *options, str(script)) as job:
        watcher = Client(first.address, token)
        for kind, _ in watcher.watch(job):
            if kind == "progress" and (begun := stopped_in_an_epoch(first, job)):
                break
        else:
            pytest.fail("the job has ended, and no snapshot was in the middle of an epoch")
        watcher.close()
        os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(DEADLINE_S)
    second = start_server(tmp_path, "--listen", first.address)
    jobs = JobsClient(second.address, token)
    try:
        events = list(jobs.watch(job))
    finally:
        jobs.close()
        stop(workers, second.process)
    assert events[-1].data["state"] == "succeeded", events[-1]
    ends = [event.data for event in events if event.kind == "epoch_end"]
    assert [(end["epoch"], end["samples"]) for end in ends] == [(epoch, ROWS) for epoch in range(EPOCHS)]
    texts = " ".join(event.data["text"] for event in events if event.kind == "log")
    found = re.search(r"training goes on after (\d+) samples of epoch (\d+)", texts)
    kept, epoch = int(found.group(1)), int(found.group(2)) - 1
    assert (epoch, kept) >= (begun.epoch, begun.samples)
    result = next(event.data for event in events if event.kind == "result")
    trained = sum(worker["samples"] for worker in result["workers"].values())
    assert trained == EPOCHS * ROWS, "what the snapshot has, and what the second server has leased"
    joined = {json.dumps(event.data["pid"]) for event in events if event.kind == "worker_joined"}
    assert len(joined) == 2, "the workers' processes outlive the server"
