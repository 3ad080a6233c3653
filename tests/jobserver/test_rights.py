"""Rights of callers: a slot registers, and reports only as the worker that it is assigned to."""

from __future__ import annotations

import grpc
import pytest

from nfdt.core.errors import PolicyRefused
from nfdt.core.wire import jobs_pb2, workers_pb2
from nfdt.jobserver import main as server
from tests.support.fakes import DEADLINE_S, of
from tests.support.job_server import LocalJobServer


def test_a_worker_reports_for_itself_only(start, cluster):
    codes = []

    def on_task(slot, task):
        own = next(a for a in slot.assignments if isinstance(a, workers_pb2.WorkerAssignment))
        other = {"worker-0": "worker-1", "worker-1": "worker-0"}[own.worker]
        for worker, token in [(other, own.job_token), (other, ""), (own.worker, ""), ("worker-7", own.job_token)]:
            request = workers_pb2.NextRequest(job_id=own.job_id, worker=worker, job_token=token)
            with pytest.raises(grpc.RpcError) as caught:
                slot._stub.Next(request, timeout=DEADLINE_S)
            codes.append(caught.value.code())

    client = start(shards=1)
    cluster.add("worker", 2, on_task=on_task)
    events = client.finish(client.submit(client.spec(epochs=1)))
    assert events[-1][1]["state"] == "succeeded"
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}


def test_the_token_of_the_server_s_own_slots_is_for_slots(tmp_path, monkeypatch):
    """Reason: the token is in the memory of processes that run the code of jobs."""
    token = "s" * 64
    monkeypatch.setattr(server.secrets, "token_hex", lambda count: token)
    cluster = LocalJobServer(tmp_path / "state")
    try:
        client = cluster.start()
        cluster.add("shard", token=token), cluster.add("worker", token=token)
        assert client.finish(client.submit(client.spec(epochs=1, workers=1)))[-1][1]["state"] == "succeeded"
        with pytest.raises(PolicyRefused, match="whose role is work"):
            cluster.client(token).call("List", jobs_pb2.ListRequest())
    finally:
        cluster.stop()


def test_refused_pushes_are_named_and_counted_when_their_epoch_ends(start, cluster):
    def on_task(slot, task):
        shard = cluster.slots[0].shard
        shard.counts["worker-0"] = {"dropped": 2 if task.task < 10 else 5, "duplicates": 1}

    client = start(shards=1)
    cluster.add("worker", on_task=on_task)
    events = client.finish(client.submit(client.spec(epochs=3, cluster={"workers": 1, "epoch_overlap": False})))
    logs = of(events, "log")
    counts = [data["text"] for data in logs if data["text"].startswith("Refused")]
    assert counts == [f"Refused gradients in this epoch: {count} of worker-0." for count in (2, 3)]
    (warning,) = [data["text"] for data in logs if data["level"] == "warning"]
    assert warning.startswith("The training diverges: Gradients of worker-0 were refused")
    result = of(events, "result")[0]
    assert (result["workers"]["worker-0"]["dropped"], result["workers"]["worker-0"]["duplicates"]) == (5, 1)
