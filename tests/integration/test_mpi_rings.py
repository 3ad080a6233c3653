"""Rings and groups among the ranks of one MPI launch: ``mpirun nfdt mpi``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import DIGITS, NFDT, environment

DEADLINE_S = 540
pytestmark = [
    pytest.mark.long,
    pytest.mark.horovod,
    pytest.mark.timeout(600),
    pytest.mark.mpi,
]

TRAIN = """
history = model.fit(x[:1440], y[:1440], batch_size=32, epochs=2, verbose=0)
rows = list(history.nfdt.values())
print(json.dumps(dict(
    loss=history.history["loss"], samples=sum(row["samples"] for row in rows), ranks=[row["ranks"] for row in rows],
    groups=sorted(row["group"] for row in rows if row.get("group")),
)))
"""


def launch(folder: Path, ranks: int, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script under mpirun with so many ranks; rank 0 serves."""
    path = folder / "script.py"
    path.write_text(DIGITS + script)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)]
    return subprocess.run(
        [*mpirun, *NFDT, "mpi", *options, str(path)],
        cwd=folder,
        env=environment(HOME=str(folder)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def answer_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def test_the_ranks_that_work_form_one_ring(tmp_path):
    got = answer_of(launch(tmp_path, 4, "model = build()" + TRAIN, "--algorithm", "allreduce"))
    assert got["ranks"] == [3]
    assert got["samples"] == 2 * 1440
    assert got["loss"][1] < got["loss"][0]


def test_the_ranks_that_work_form_groups(tmp_path):
    options = ("--algorithm", "group-sync", "--set", "groups=0,1;2,3")
    got = answer_of(launch(tmp_path, 5, "model = build()" + TRAIN, *options))
    assert got["groups"] == [[0, 1], [2, 3]]
    assert got["ranks"] == [2, 2]
    assert got["samples"] == 2 * 1440
    assert got["loss"][1] < got["loss"][0]


FAILS = """
import os

class Fails(keras.layers.Layer):
    def call(self, x):
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "2":
            raise RuntimeError("the layer of rank two fails")
        return x

model = build()
model = keras.Sequential([model, Fails()])
model.compile("sgd", "sparse_categorical_crossentropy")
model.fit(x[:1440], y[:1440], batch_size=32, epochs=2, verbose=0)
"""


def test_an_exception_in_a_rank_ends_the_launch_with_its_text(tmp_path):
    done = launch(tmp_path, 4, FAILS, "--algorithm", "allreduce")
    assert done.returncode == 3
    assert done.returncode == 3
    assert "the layer of rank two fails" in done.stderr
    assert "RuntimeError" in done.stderr


KILLS = """
import os, signal, psutil

def is_rank_two(process):
    try:
        return process.environ().get("OMPI_COMM_WORLD_RANK") == "2" and "mpirun" in process.parent().name()
    except (psutil.Error, AttributeError):
        return False

def kill_rank_two(batch, logs):
    ours = psutil.Process().parent().children()
    (process,) = [each for each in ours if is_rank_two(each)]
    process.send_signal(signal.SIGKILL)

model = build()
model.fit(x[:1440], y[:1440], batch_size=32, epochs=50, verbose=0,
          callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=kill_rank_two)])
"""


def test_a_killed_rank_ends_the_launch_which_names_it(tmp_path):
    done = launch(tmp_path, 4, KILLS, "--algorithm", "group-sync", "--set", "groups=0,1;2")
    assert done.returncode == 128 + 9
    assert "process rank 2" in done.stderr
    assert "signal 9" in done.stderr
