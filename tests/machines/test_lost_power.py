"""Rings that mpirun and horovodrun start over ssh, when one of their machines loses its power."""

from __future__ import annotations

import time

import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.scripts import DIGITS, NFDT, environment
from tests.support.ssh import Logins

pytestmark = [pytest.mark.ssh, pytest.mark.horovod, pytest.mark.long, pytest.mark.timeout(400)]

HFDT = "from nfdt.cli import hfdt_main; hfdt_main()"
LOST_S = 8.0  # time limit of a silent machine
SLACK_S = 20.0  # for the end of processes, or a new world, where the machine is busy
TRAIN = (
    DIGITS
    + """
class Epochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
model = build()
history = model.fit(x[:1500], y[:1500], batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[Epochs()])
print("ENDED", history.nfdt["worker-0"]["samples"], history.nfdt["worker-0"]["ranks"])
"""
)


@pytest.fixture
def ring(machines, tmp_path):
    """Return a function that starts a ring of one rank per machine, and the machines."""
    rig = machines(3)
    logins = Logins(rig, tmp_path)

    def start(epochs: int, *options: str):
        script = tmp_path / "train.py"
        script.write_text(TRAIN.replace("EPOCHS", str(epochs)))
        hosts = ",".join(f"{machine.name}:1" for machine in rig)
        command = [NFDT[0], "-c", HFDT, "run", "-np", "3", "-H", hosts, "--log-level", "info", *options, str(script)]
        process = rig[0].popen(command, env=environment(PATH=logins.path), cwd=tmp_path)
        MachinesCluster.await_text(process, process.output, r"(epoch 1)")
        return process

    return start, rig


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_ring_ends_within_seconds_and_names_the_machine(ring, launcher):
    start, rig = ring
    process = start(100_000, "--launcher", launcher)
    rig[2].lose_power()
    began = time.monotonic()
    assert process.wait(200) != 0
    seconds = time.monotonic() - began
    assert f"{rig[2].name} has not answered for 8 s" in process.error_output()
    assert seconds < LOST_S + SLACK_S


def test_an_elastic_ring_goes_on_within_seconds_without_the_machine(ring):
    start, rig = ring
    process = start(30, "--min-np", "2", "--set", "network_interfaces=eth0", "--set", "host_cooldown_s=1")
    rig[2].lose_power()
    began = time.monotonic()
    news = rf"ranks came or went: 2 are there now, without a rank on {rig[2].name}"
    MachinesCluster.await_text(process, process.error_output, f"({news})")
    assert time.monotonic() - began < LOST_S + SLACK_S
    assert process.wait(200) == 0, process.error_output()[-4000:]
    assert "ENDED 45000 2" in process.output()
