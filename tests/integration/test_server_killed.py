"""A job server that is killed and started again: its jobs go on with the workers that are still there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest
from nfdt_client.connection import JobsClient

from tests.support.fakes import Client
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, environment, start_server, start_workers, stop

EPOCHS = 6
SCRIPT = DIGITS + f"build().fit(x, y, batch_size=32, epochs={EPOCHS}, verbose=0)"


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_detached_job_goes_on_from_its_last_epoch(tmp_path):
    first = start_server(tmp_path)
    workers = start_workers(first, 2)
    token = first.token_file.read_text()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = environment(NFDT_TOKEN_FILE=str(first.token_file))
    options = ["--server", first.address, "--workers", "2", "--set", "emulate.step_ms=20"]
    done = subprocess.run(
        [*NFDT, "run", "--detach", *options, str(script)], env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    job = re.search(r"job-\w+", done.stdout).group()
    watcher = Client(first.address, token)
    watcher.until(job, "epoch_begin", epoch=2)
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
    epochs = [event.data["epoch"] for event in events if event.kind == "epoch_end"]
    assert epochs == list(range(EPOCHS))
    texts = " ".join(event.data["text"] for event in events if event.kind == "log")
    assert "training goes on from the end of epoch 2" in texts or "from the end of epoch 1" in texts
    joined = {json.dumps(event.data["pid"]) for event in events if event.kind == "worker_joined"}
    assert len(joined) == 2, "the workers' processes outlive the server"
