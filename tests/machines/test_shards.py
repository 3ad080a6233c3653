"""Shards and workers on machines of their own, over TLS."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.scripts import DIGITS, answer

TRAIN = (
    DIGITS
    + """
import nfdt
with nfdt.session(workers={workers}, shards={shards}, algorithm="asgd"):
    model = build()
    history = model.fit(x[:1500], y[:1500], batch_size=32, epochs={epochs}, verbose=0)
workers = history.nfdt
print(json.dumps(dict(
    loss=history.history["loss"],
    hosts=sorted(w["host"] for w in workers.values()),
    samples=sum(w["samples"] for w in workers.values()),
    weights=sum(int(w.size) for w in model.get_weights()),
)))
"""
)


@pytest.mark.long
def test_shards_are_placed_on_the_machines_that_offer_them(machines, tmp_path):
    server, worker, one, two = machines(["server", "worker", "one", "two"])
    with MachinesCluster(tmp_path, server) as cluster:
        for machine in (one, two):
            cluster.offer(machine, shards=1)
        cluster.offer(worker, slots=2)
        got = answer(cluster.run_script(TRAIN.format(workers=2, shards=2, epochs=3)))
        assert got["hosts"] == ["worker", "worker"]
        assert got["samples"] == 4500
        assert got["loss"][-1] < got["loss"][0]
        for number, machine in enumerate((one, two)):
            log = "".join(p.read_text() for p in machine.from_outside(machine.home).rglob("*shard*.log"))
            assert f"shard {number} serves at {machine.address}:" in log


@pytest.mark.long
def test_the_servers_machine_makes_up_for_missing_shards(machines, tmp_path):
    server, worker, one = machines(["server", "worker", "one"])
    with MachinesCluster(tmp_path, server) as cluster:
        cluster.offer(one, shards=1)
        cluster.offer(worker, slots=1)
        got = answer(cluster.run_script(TRAIN.format(workers=1, shards=2, epochs=1)))
        assert got["samples"] == 1500


@pytest.mark.long
def test_the_shard_of_a_lost_machine_goes_on_on_another(machines, tmp_path):
    server, worker, one, two = machines(["server", "worker", "one", "two"])
    with MachinesCluster(tmp_path, server) as cluster:
        cluster.offer(one, shards=1, options=["--wait", "5"])
        cluster.offer(two, shards=1)
        cluster.offer(worker, slots=1)
        script = """
import keras
import nfdt
class Print(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
"""
        script += TRAIN.format(workers=1, shards=1, epochs=40).replace("verbose=0", "verbose=0, callbacks=[Print()]")
        process = cluster.start_script(script)
        cluster.await_text(process, process.output, r"(epoch 0)")
        one.kill()
        assert process.wait(240) == 0, process.error_output()
        got = json.loads(process.output().strip().splitlines()[-1])
        assert len(got["loss"]) == 40
        assert got["samples"] >= 40 * 1500
        log = "".join(path.read_text() for path in two.from_outside(two.home).rglob("*shard*.log"))
        assert f"shard 0 serves at {two.address}:" in log
