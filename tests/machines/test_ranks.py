"""Rings and groups whose ranks are slots of several machines, over TLS but for the allreduce itself."""

from __future__ import annotations

import json
import time

import psutil
import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.machines import Machine
from tests.support.scripts import DIGITS, answer

LOST_S = 8.0  # time limit of a silent machine
SLACK_S = 20.0  # for a new world, where the machine is busy
PLAIN_TEXT = "--insecure-allreduce"
TRAIN = (
    DIGITS
    + """
import nfdt
{before}
with nfdt.session(workers={workers}, **{options}):
    model = build()
    history = model.fit(x[:1500], y[:1500], batch_size=32, epochs={epochs}, verbose=0, callbacks={callbacks})
workers = history.nfdt
print(json.dumps(dict(
    loss=history.history["loss"],
    groups=sorted(w.get("group", []) for w in workers.values()),
    ranks=[w.get("ranks") for w in workers.values()],
    samples=sum(w.get("samples", 0) for w in workers.values()),
)))
"""
)
EPOCHS = """
import logging
logging.basicConfig(level="INFO")
class Epochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
"""


def training(workers: int, epochs: int, *, before: str = "", callbacks: str = "[]", **options) -> str:
    return TRAIN.format(workers=workers, epochs=epochs, before=before, callbacks=callbacks, options=options)


def test_an_allreduce_spans_machines(machines, tmp_path):
    rig = machines(3)
    with MachinesCluster(tmp_path, rig[0], PLAIN_TEXT) as cluster:
        for machine in rig:
            cluster.offer(machine, slots=1)
        got = answer(cluster.run_script(training(3, 2, algorithm="allreduce")))
    assert got["ranks"] == [3]
    assert got["samples"] == 3000
    assert got["loss"][1] < got["loss"][0]


@pytest.mark.long
def test_slots_of_the_servers_own_machine_are_ranks_under_its_name(machines, tmp_path):
    rig = machines(2)
    own = ["--workers", "1", "--advertise", rig[0].name]
    with MachinesCluster(tmp_path, rig[0], PLAIN_TEXT, *own) as cluster:
        cluster.offer(rig[1], slots=1)
        got = answer(cluster.run_script(training(2, 2, algorithm="allreduce")))
    assert got["ranks"] == [2]
    assert got["samples"] == 3000


@pytest.mark.long
def test_an_allreduce_over_machines_needs_the_servers_consent(machines, tmp_path):
    rig = machines(2)
    with MachinesCluster(tmp_path, rig[0]) as cluster:
        for machine in rig:
            cluster.offer(machine, slots=1)
        done = cluster.run_script(training(2, 1, algorithm="allreduce"))
    assert done.returncode != 0
    assert "PolicyRefused" in done.stderr
    assert "Received: 1 on node0, 1 on node1" in done.stderr
    assert "--insecure-allreduce" in done.stderr


@pytest.mark.long
def test_groups_without_plain_text_stay_on_their_machines(machines, tmp_path):
    rig = machines(3)
    with MachinesCluster(tmp_path, rig[0]) as cluster:
        for machine in rig[1], rig[2]:
            cluster.offer(machine, slots=2)
        got = answer(cluster.run_script(training(4, 2, algorithm="group-sync", groups="0,1;2,3")))
    assert got["groups"] == [[0, 1], [2, 3]]
    assert got["samples"] == 3000


def kill_slot(machine: Machine) -> None:
    found = [process for process in map(psutil.Process, machine.processes()) if process.name() == "nfdt worker 0"]
    assert len(found) == 1
    found[0].kill()


def grouped(epochs: int) -> str:
    options = dict(algorithm="group-sync", groups="0,1;2", emulate={"step_ms": [20, 20, 20]})
    return training(3, epochs, before=EPOCHS, callbacks="[Epochs()]", **options)


def lose(machine: Machine, how: str) -> None:
    if how == "a killed rank":
        kill_slot(machine)
    elif how == "a killed machine":
        machine.kill()
    else:
        machine.cut()


@pytest.mark.long
def test_a_group_over_machines_goes_on_when_a_rank_is_killed(machines, tmp_path):
    rig = machines(3)
    with MachinesCluster(tmp_path, rig[0], PLAIN_TEXT) as cluster:
        for machine in rig:
            cluster.offer(machine, slots=1)
        process = cluster.start_script(grouped(8))
        cluster.await_text(process, process.output, r"(epoch 1)")
        lose(rig[1], "a killed rank")
        assert process.wait(240) == 0, process.error_output()[-4000:]
        assert "is formed again" in process.error_output()
        assert '"samples": 12000' in process.output()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "spare", "expected"),
    [
        ("a killed machine", False, "goes on without 1: their machines offer no slot"),
        ("a killed machine", True, "1: spare-worker-0"),
        ("a cut link", False, "goes on without 1: their machines offer no slot"),
    ],
)
def test_a_group_loses_a_machine(machines, tmp_path, how, spare, expected):
    names = ["one", "two", "three"]
    rig = machines(["server", *names, *(["spare"] if spare else [])])
    with MachinesCluster(tmp_path, rig["server"], PLAIN_TEXT) as cluster:
        for name in names:
            cluster.offer(rig[name], slots=1, options=["--wait", "5"])
        process = cluster.start_script(grouped(60))
        cluster.await_text(process, process.output, r"(epoch 1)")
        if spare:
            cluster.offer(rig["spare"], slots=1)
        lost = cluster.await_text(process, process.error_output, r"1: (\w+)-worker")
        lose(rig[lost], how)
        assert process.wait(400) == 0, process.error_output()[-4000:]
        assert expected in process.error_output()
        assert '"samples": 90000' in process.output()


UNTIL_STOPPED = """
import logging, os
logging.basicConfig(level="INFO")
class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        self.model.stop_training = os.path.exists("stop")
"""


@pytest.mark.feature("An elastic ring in worker slots loses a machine", area="Failures")
@pytest.mark.long
@pytest.mark.horovod
@pytest.mark.timeout(500)
@pytest.mark.parametrize("rank", [0, 1], ids=["the leader's", "another"])
def test_an_elastic_ring_goes_on_within_seconds_without_a_machine_and_takes_a_free_slot(machines, tmp_path, rank):
    names = ["one", "two", "three"]
    rig = machines(["server", *names, "spare"])
    options = dict(algorithm="allreduce", min_workers=2, host_cooldown_s=1, emulate={"step_ms": [20] * 5})
    with MachinesCluster(tmp_path, rig["server"], PLAIN_TEXT) as cluster:
        for name in names:
            cluster.offer(rig[name], slots=1, options=["--wait", "5"])
        process = cluster.start_script(training(3, 1000, before=UNTIL_STOPPED, callbacks="[Stops()]", **options))
        cluster.await_text(process, process.output, r"(epoch 1)")
        lost = cluster.await_text(process, process.error_output, rf"{rank}: (\w+)-worker")
        rig[lost].lose_power()
        began = time.monotonic()
        news = rf"ranks came or went: 2 are there now. {lost}-worker-\S+ on {lost} is lost: .* no sign of life for 8 s"
        cluster.await_text(process, process.error_output, f"({news})")
        epochs = process.output().count("epoch")
        cluster.await_text(process, process.output, rf"(epoch {epochs})\n")
        assert time.monotonic() - began < LOST_S + SLACK_S
        cluster.offer(rig["spare"], slots=1)
        cluster.await_text(process, process.error_output, r"(ranks came or went: 3 are there now)")
        (tmp_path / "stop").touch()
        assert process.wait(300) == 0, process.error_output()[-4000:]
    got = json.loads(process.output().strip().splitlines()[-1])
    assert got["samples"] == 1500 * len(got["loss"])
    assert got["ranks"] == [3]
