"""Slurm: srun, sbatch, heterogeneous jobs and requeued jobs on two machines, with a real slurmctld and slurmd."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.machines import Rig
from tests.support.scripts import DIGITS
from tests.support.slurm import SlurmCluster

ROOT = Path(__file__).parents[2]
NFDT = Path(sys.executable).with_name("nfdt")
PATH = f"{NFDT.parent}:{os.environ['PATH']}"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
LOST_S = 8.0  # after which a silent machine is lost
SLACK_S = 22.0  # for an epoch of fewer workers on a busy machine

TRAIN = (
    DIGITS
    + """
import os
assert os.environ["NFDT_RENDEZVOUS_DIR"]
model = build()
history = model.fit(x[:1500], y[:1500], batch_size=32, epochs=2, verbose=0)
workers = history.nfdt
samples = sum(w["samples"] for w in workers.values())
print(json.dumps(dict(loss=history.history["loss"], workers=len(workers), samples=samples, args=sys.argv[1:])))
"""
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Rig(2) as rig, SlurmCluster(rig, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def run(slurm, folder, *command, **options):
    """Run a command of Slurm as a user whose rendezvous directory is in ``folder``."""
    return slurm.run(command, cwd=folder, NFDT_RENDEZVOUS_DIR=str(folder / "rendezvous"), PATH=PATH, **options)


def trained(text):
    """Return the last line of JSON that a script printed."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


@pytest.mark.feature("Slurm: `srun`", area="Launchers and environments")
def test_srun_trains_on_two_machines(slurm, script, tmp_path):
    done = run(slurm, tmp_path, "srun", "--nodes=2", "--ntasks=3", "nfdt", "mpi", script, "--flag", "a b")
    got = trained(done.stdout)
    assert (got["workers"], got["samples"], got["args"]) == (2, 3000, ["--flag", "a b"])
    assert got["loss"][1] < got["loss"][0]
    assert list((tmp_path / "rendezvous").iterdir()) == [], "nothing of the launch remains"


@pytest.mark.long
def test_the_parts_of_a_heterogeneous_job_are_one_launch(slurm, script, tmp_path):
    first = ["srun", "--ntasks=1", "--cpus-per-task=1", "--nodelist=node0", "nfdt", "mpi", script]
    second = ["--ntasks=2", "--cpus-per-task=3", "--nodelist=node1", "nfdt", "mpi", script]
    got = trained(run(slurm, tmp_path, *first, ":", *second).stdout)
    assert (got["workers"], got["samples"]) == (2, 3000)


@pytest.mark.long
@pytest.mark.parametrize("name", ["nfdt.sbatch", "nfdt-heterogeneous.sbatch"])
def test_the_example_trains(slurm, script, tmp_path, name):
    environment = {"NFDT_VENV": str(NFDT.parent.parent)}
    submitted = run(slurm, tmp_path, "sbatch", "--parsable", ROOT / "examples" / "hpc" / name, script, **environment)
    fields = slurm.await_state(submitted.stdout.strip(), "COMPLETED", "FAILED")
    text = Path(fields["StdOut"]).read_text()
    assert fields["JobState"] == "COMPLETED", text
    assert trained(text)["samples"] == 3000


RESUMED = (
    DIGITS
    + """
import os, pathlib, subprocess
folder = pathlib.Path(sys.argv[1])
class Note(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        with open(folder / "runs", "a") as file:
            print(int(model.optimizer.iterations), file=file)
    def on_epoch_begin(self, epoch, logs=None):
        with open(folder / "epochs", "a") as file:
            print(epoch, file=file)
    def on_train_batch_end(self, batch, logs=None):
        if batch >= 20 and (folder / "epochs").read_text().split() == ["0", "1"]:
            subprocess.run(sys.argv[2].split() + [os.environ["SLURM_JOB_ID"]], check=False)  # SIGTERM ends it too
model = build()
backup = keras.callbacks.BackupAndRestore(folder / "backup")
history = model.fit(x[:1500], y[:1500], batch_size=32, epochs=3, verbose=0, callbacks=[backup, Note()])
print(json.dumps(dict(epochs=history.epoch, iterations=int(model.optimizer.iterations))))
"""
)


@pytest.mark.feature("Slurm: `nfdt submit --slurm`", area="Launchers and environments")
@pytest.mark.long
@pytest.mark.parametrize("cause", ["scancel --signal=TERM", "scontrol requeue"], ids=["signal", "requeue"])
def test_a_job_that_is_stopped_continues_from_its_backup(slurm, tmp_path, cause):
    """Submit with ``nfdt submit``; SIGTERM comes in the second epoch, as before the end of --time or at preemption."""
    script = tmp_path / "train.py"
    script.write_text(RESUMED)
    options = ["--nodes", "2", "--ntasks-per-node", "1", "--time", "10:00", "--requeue", "60"]
    done = run(slurm, tmp_path, NFDT, "submit", "--slurm", *options, script, tmp_path, cause)
    job = done.stdout.split()[-1]
    slurm.await_state(job, "PENDING", restarts=1)
    # Slurm waits two minutes otherwise, and refuses a start in the second in which it revoked the first credential.
    slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"])
    fields = slurm.await_state(job, "COMPLETED", "FAILED")
    text = Path(fields["StdOut"]).read_text()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), text + slurm.logs()
    first, second = map(int, (tmp_path / "runs").read_text().split())
    assert first == 0
    assert second >= 47 + 20, "the steps of the epoch that was cut short are in the backup"
    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "1", "2"]
    assert trained(text)["epochs"] == [1, 2]


LOST = (
    DIGITS
    + """
import pathlib, time
class Note(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open(sys.argv[1], "a") as file:
            print(time.time(), file=file)
history = build().fit(x[:1500], y[:1500], batch_size=32, epochs=8, verbose=0, callbacks=[Note()])
print(json.dumps(dict(samples=sum(w["samples"] for w in history.nfdt.values()), workers=sorted(history.nfdt))))
"""
)


@pytest.mark.feature("Slurm: a node that loses its power", area="Failures")
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="default"),
        pytest.param(["--algorithm", "allreduce", "--insecure-allreduce", "--set", "min_workers=1"], id="elastic"),
    ],
)
def test_the_others_go_on_when_a_node_loses_its_power(tmp_path, options):
    (script := tmp_path / "train.py").write_text(LOST)
    ends = tmp_path / "ends"
    with Rig(3) as rig, SlurmCluster(rig, tmp_path, lost_s=20) as slurm:
        command = [NFDT, "submit", "--slurm", "--nodes", "3", "--ntasks-per-node", "1", "--time", "10:00"]
        command += ["--set", "emulate.step_ms=100", *options, script, ends]
        job = run(slurm, tmp_path, *command).stdout.split()[-1]
        slurm.await_state(job, "RUNNING")
        await_lines(ends, 2)
        rig[2].lose_power()
        fields = slurm.await_state(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
        text = Path(fields["StdOut"]).read_text()
        assert fields["JobState"] == "COMPLETED", text + slurm.logs()
    assert trained(text)["samples"] == 8 * 1500
    times = [float(line) for line in ends.read_text().splitlines()]
    assert max(later - before for before, later in pairwise(times)) < LOST_S + SLACK_S


def await_lines(path, count):
    deadline = time.monotonic() + 300
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"{path} has no {count} lines"
        time.sleep(0.1)
