"""Real workers behind a network that is cut for a while: they resume where they stopped."""

from __future__ import annotations

import dataclasses

import psutil
import pytest
from nfdt_client.connection import JobsClient

from nfdt.core.wire import jobs_pb2
from tests.support.relay import Relay
from tests.support.scripts import DEADLINE_S, DIGITS, answer, descendants, start_server, start_workers, stop

pytestmark = pytest.mark.processes

SUBMIT = """
import nfdt
def train():
    build().fit(x[:960], y[:960], batch_size=32, epochs=100_000)
handle = nfdt.submit(train, workers=2, algorithm="bsp", options={"emulate.step_ms": (40, 40)})
print(json.dumps(dict(job=handle.job_id)))
"""


@pytest.mark.feature("Workers are cut off for a while", area="Failures")
def test_workers_that_are_cut_off_come_back_and_nothing_is_done_twice(run_script, tmp_path):
    cluster = start_server(tmp_path)
    relay = Relay(cluster.address)
    workers = start_workers(dataclasses.replace(cluster, address=relay.address), 2, "--wait", str(DEADLINE_S))
    connection = JobsClient(cluster.address, cluster.token_file.read_text())
    try:
        job = answer(run_script(DIGITS + SUBMIT, **cluster.env()))["job"]
        events, enough = [], None
        for event in connection.watch(job):
            events.append((event.kind, event.data))
            if event.kind == "epoch_end" and enough is None:
                slots = descendants(workers.pid)
                relay.cut()
                assert relay.until_refused(6, DEADLINE_S)
                relay.mend()
                enough = connection.show(job).epoch + 2
            elif event.kind == "epoch_end" and event.data["epoch"] == enough:
                connection.control(job, stop_training=jobs_pb2.StopTraining())
        assert events[-1][1]["state"] == "succeeded"
        assert [data for kind, data in events if kind == "worker_lost"] == []
        epochs = [data["samples"] for kind, data in events if kind == "epoch_end"]
        assert set(epochs[:-1]) == {960}
        result = next(data for kind, data in events if kind == "result")
        assert sum(row["samples"] for row in result["workers"].values()) == sum(epochs)
        assert all(slot.status() != psutil.STATUS_ZOMBIE for slot in slots)
    finally:
        connection.close()
        stop(workers, cluster.process)
        relay.close()
