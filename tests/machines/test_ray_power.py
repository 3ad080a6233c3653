"""A Ray cluster of several machines, one of which loses its power while a script trains on its workers."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.scripts import DIGITS, NFDT, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PORT = 6379  # of the head, in a machine of its own
STORE_BYTES = 80 * 2**20  # the least that Ray accepts
LOST_S, SLACK_S = 8.0, 22.0  # limit of a silent machine, and for an epoch of fewer workers on a busy machine
EPOCHS = 8
TRAIN = (
    DIGITS
    + f"""
import time
class Ends(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "at", time.time(), flush=True)
history = build().fit(x[:1500], y[:1500], batch_size=32, epochs={EPOCHS}, verbose=0, callbacks=[Ends()])
print(json.dumps(dict(samples=sum(w["samples"] for w in history.nfdt.values()))))
"""
)


@pytest.fixture
def ray(machines, tmp_path):
    """Provide three machines: the head of a Ray cluster, and two with a processor each."""
    pytest.importorskip("ray", reason="the extra ray is missing")
    rig = machines(3)
    command = [Path(sys.executable).with_name("ray"), "start", "--block", f"--object-store-memory={STORE_BYTES}"]
    for machine in rig:
        head = [f"--address={rig[0].address}:{PORT}", "--num-cpus=1"]
        if machine is rig[0]:
            head = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
        machine.run(["mkdir", "-p", machine.tmp / "ray"])
        variables = {"RAY_TMPDIR": str(machine.tmp / "ray"), "RAY_DISABLE_MEMORY_MONITOR": "1"}
        process = machine.popen([*command, *head, f"--node-ip-address={machine.address}"], env=environment(**variables))
        MachinesCluster.await_text(process, process.output, "(Ray runtime started)")
    return rig


@pytest.mark.feature("Ray: a node that loses its power", area="Failures")
def test_the_others_go_on_when_a_machine_loses_its_power(ray, tmp_path):
    (script := tmp_path / "train.py").write_text(TRAIN)
    options = ["--address", f"{ray[0].address}:{PORT}", "--workers", "2", "--set", "emulate.step_ms=100"]
    command = [*NFDT, "run", "--on", "ray", *options, "--set", "start_timeout_s=500", script]
    process = ray[0].popen(command, env=environment(), cwd=tmp_path)
    MachinesCluster.await_text(process, process.output, "(epoch 1)")
    ray[2].lose_power()
    assert process.wait(400) == 0, process.error_output()[-4000:]
    *lines, last = process.output().splitlines()
    result = json.loads(last)
    assert result["samples"] == EPOCHS * 1500
    assert len(lines) == EPOCHS, "Ray writes no lines of its own"
    times = [float(line.split()[-1]) for line in lines]
    assert max(later - before for before, later in pairwise(times)) < LOST_S + SLACK_S
    assert time.time() - times[-1] < LOST_S + SLACK_S
