"""Slots that announce their end."""

from __future__ import annotations

import threading

from tests.support.fakes import DEADLINE_S, of


def test_a_shard_moves_from_a_slot_that_is_about_to_end(start, cluster):
    reached, go_on = threading.Event(), threading.Event()

    def wait(slot, task):
        reached.set()
        assert go_on.wait(DEADLINE_S)

    client = start(shards=1)
    cluster.add("worker", on_task=wait)
    job = client.submit(client.spec(epochs=2, workers=1))
    assert reached.wait(DEADLINE_S)
    (shard,) = cluster.slots[:1]
    (successor,) = cluster.add("shard")
    shard.drain()
    client.until(job, "shards_restored")
    assert shard.released.wait(DEADLINE_S)
    go_on.set()
    events = client.finish(job)
    assert events[-1][1]["state"] == "succeeded"
    assert of(events, "shard_lost") == [{"shard": "shard-0", "reason": "its process was asked to end"}]
    assert [data["samples"] for data in of(events, "epoch_end")] == [40, 40]
    assert successor.assignments
