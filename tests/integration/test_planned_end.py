"""A machine's scheduler ends all processes of ``nfdt worker`` while a job runs: no step is done twice."""

from __future__ import annotations

import contextlib

import psutil
import pytest
from nfdt_client.connection import JobsClient

from nfdt.core.wire import jobs_pb2
from tests.support.scripts import DEADLINE_S, DIGITS, answer, descendants, start_server, start_workers, stop

pytestmark = pytest.mark.processes

SUBMIT = """
import nfdt
def train():
    build().fit(x[:960], y[:960], batch_size=32, epochs=100_000)
handle = nfdt.submit(train, workers=2, algorithm="asgd", options={"emulate.step_ms": (40, 40)})
print(json.dumps(dict(job=handle.job_id)))
"""


def terminate(process, whole_machine):
    """Send SIGTERM to ``nfdt worker`` or, as Slurm and systemd do, to its slots and their fork server too."""
    for one in [*(descendants(process.pid) if whole_machine else ()), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()


@pytest.mark.feature("A machine is needed by others (SIGTERM)", area="Failures")
@pytest.mark.parametrize(
    "whole_machine", [pytest.param(False, marks=pytest.mark.long), True], ids=["command", "all_processes"]
)
def test_workers_whose_machine_is_needed_leave_and_nothing_is_done_twice(run_script, tmp_path, whole_machine):
    cluster = start_server(tmp_path)
    kept = start_workers(cluster, 1, "--name", "kept")
    ending = start_workers(cluster, 1, "--name", "ending", "--grace", "1000")
    connection = JobsClient(cluster.address, cluster.token_file.read_text())
    try:
        job = answer(run_script(DIGITS + SUBMIT, **cluster.env()))["job"]
        events, enough = [], None
        for event in connection.watch(job):
            events.append((event.kind, event.data))
            if event.kind == "epoch_end" and enough is None:
                terminate(ending, whole_machine)
                assert ending.wait(DEADLINE_S) == 0
                enough = connection.show(job).epoch + 2
            elif event.kind == "epoch_end" and event.data["epoch"] == enough:
                connection.control(job, stop_training=jobs_pb2.StopTraining())
        assert events[-1][1]["state"] == "succeeded"
        (lost,) = [data for kind, data in events if kind == "worker_lost"]
        assert lost["reason"] == "it left the job"
        epochs = [data["samples"] for kind, data in events if kind == "epoch_end"]
        assert set(epochs[:-1]) == {960}
        result = next(data for kind, data in events if kind == "result")
        assert sum(row["samples"] for row in result["workers"].values()) == sum(epochs)
    finally:
        connection.close()
        stop(kept, ending, cluster.process)
