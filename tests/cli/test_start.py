"""``nfdt start`` and ``nfdt stop``, with scripts that train on the warm server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from nfdt.core.host.warm import description_file
from tests.support.scripts import DEADLINE_S, NFDT, environment

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os, sys
import keras
import numpy as np
import shift

class Shifted(keras.layers.Layer):
    def call(self, x):
        return x + shift.SHIFT

x = np.ones((64, 2), "f4")
model = keras.Sequential([keras.Input((2,)), Shifted(), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(keras.optimizers.SGD(0.0), "mae")
history = model.fit(x, np.zeros((64, 1), "f4"), epochs=1, verbose=0)
print(json.dumps(dict(loss=history.history["loss"][0], workers=len(history.nfdt))))
"""
DECORATED = """
from nfdt import distribute

@distribute(workers=2)
def main():
    exec(open("train.py").read(), globals())

main()
"""


class Machine:
    """Folders of one user, and the commands that the user runs there."""

    def __init__(self, folder, runtime):
        self.folder, self.runtime = folder, runtime
        self.warm = runtime / "nfdt" / "warm"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "decorated.py").write_text(DECORATED)

    def run(self, *command, **extra):
        variables = environment(XDG_RUNTIME_DIR=str(self.runtime), NFDT_WARM="true", **extra)
        return subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=DEADLINE_S
        )

    def nfdt(self, *arguments, **extra):
        return self.run(*NFDT, *arguments, **extra)

    def train(self, *options, shift=0.0, **extra):
        """Train the script, whose model adds ``shift``; return its loss, its messages, and the number of warm runs."""
        (self.folder / "shift.py").write_text(f"SHIFT = {shift}")
        done = self.nfdt("run", "--workers", "2", *options, "train.py", **extra)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])["loss"], done.stderr

    def process(self):
        return psutil.Process(json.loads(description_file(self.warm).read_text())["pid"])

    def runs(self):
        """Return the number of runs that the warm server has served."""
        return (self.warm / "warm.log").read_text().count("is forked")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    runtime = Path(tempfile.mkdtemp(prefix="nfdt-test-runtime-"))
    machine = Machine(tmp_path_factory.mktemp("user"), runtime)
    yield machine
    machine.nfdt("stop")
    shutil.rmtree(runtime)


@pytest.fixture
def warm(machine):
    """Provide a machine with a warm server."""
    done = machine.nfdt("start")
    assert done.returncode == 0, done.stderr
    return machine


@pytest.mark.feature("`nfdt start`: a warm server for the next runs", area="Launchers and environments")
def test_runs_train_on_the_warm_server_with_code_as_it_is_now(warm):
    before = warm.runs()
    loss, messages = warm.train(shift=1.0)
    assert loss == pytest.approx(4.0)
    assert "on 2 workers of the warm server, " in messages
    assert warm.train(shift=2.0)[0] == pytest.approx(6.0)  # not the module of the run before
    done = warm.run(sys.executable, "decorated.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert warm.runs() == before + 3
    assert not [p for p in warm.process().children() if p.status() != psutil.STATUS_ZOMBIE]


def test_a_second_start_names_the_one_that_runs(warm):
    process = warm.process()
    done = warm.nfdt("start")
    assert done.returncode == 0
    assert f"runs already: process {process.pid}" in done.stderr
    assert str(warm.warm / "warm.log") in done.stderr
    assert warm.process() == process


@pytest.mark.long
def test_a_run_with_its_own_server_leaves_the_warm_one_alone(warm):
    before = warm.runs()
    warm.train("--no-warm")
    assert warm.runs() == before


@pytest.mark.long
def test_a_run_that_imports_something_else_starts_its_own_server(warm, tmp_path):
    before = warm.runs()
    _, messages = warm.train(TF_SOMETHING="1")
    assert "environment TF_SOMETHING: none there, 1 here" in messages
    assert warm.runs() == before


@pytest.mark.long
def test_slots_search_modules_where_the_script_does(warm, tmp_path):
    (tmp_path / "elsewhere.py").write_text("SHIFT = 3.0")
    script = SCRIPT.replace("import shift", "import elsewhere as shift")
    (warm.folder / "searching.py").write_text(script)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path)]))
    before = warm.runs()
    done = warm.nfdt("run", "searching.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["loss"] == pytest.approx(8.0)
    assert warm.runs() == before + 1


def test_after_a_warm_server_was_killed_the_next_run_starts_its_own(warm):
    process = warm.process()
    process.kill()
    psutil.wait_procs([process], timeout=DEADLINE_S)
    loss, messages = warm.train(shift=1.0)
    assert loss == pytest.approx(4.0)
    assert f"The warm server (process {process.pid}) has ended without `nfdt stop`" in messages
    assert "warm" not in warm.train()[1]  # reported once
    assert "No warm server runs" in warm.nfdt("stop").stderr


@pytest.mark.long
def test_a_run_whose_warm_server_is_killed_fails_and_leaves_no_process(warm):
    (warm.folder / "shift.py").write_text("SHIFT = 0.0")
    report = "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print('trains', flush=True))"
    begins = SCRIPT.replace("epochs=1", f"epochs=100_000, callbacks=[{report}]")
    (warm.folder / "long.py").write_text(begins)
    script = subprocess.Popen(
        [*NFDT, "run", "long.py"],
        cwd=warm.folder,
        env=environment(XDG_RUNTIME_DIR=str(warm.runtime), NFDT_WARM="true"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert script.stdout.readline() == "trains\n"
        process = warm.process()
        processes = [process, *process.children(recursive=True)]
        assert len(processes) >= 5  # warm server, job server, fork server, a shard, workers
        assert "has ended" in warm.nfdt("stop").stderr
        assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]
        _, messages = script.communicate(timeout=DEADLINE_S)
    finally:
        script.kill()
        script.communicate()
    assert script.returncode == 4
    assert "ended" in messages


@pytest.mark.long
def test_a_script_that_is_killed_takes_its_job_server_along(warm):
    script = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import nfdt, signal; s = nfdt.session(workers=1); s.__enter__(); s.connection()"
            "; print(1, flush=True); signal.pause()",
        ],
        env=environment(XDG_RUNTIME_DIR=str(warm.runtime), NFDT_WARM="true"),
        stdout=subprocess.PIPE,
    )
    assert script.stdout.readline() == b"1\n"
    processes = warm.process().children(recursive=True)
    assert len(processes) >= 2
    script.send_signal(signal.SIGKILL)
    script.communicate()
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_description_that_others_may_touch_is_refused(machine, mode):
    machine.nfdt("stop")
    machine.warm.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = description_file(machine.warm)
    file.write_text(json.dumps({"pid": os.getpid(), "log": "", "imported": {}}))
    file.chmod(mode)
    try:
        _, messages = machine.train()
        assert "The warm server is not used" in messages
        assert str(file) in messages
        for command in ("start", "stop"):
            done = machine.nfdt(command)
            assert done.returncode == 2
            assert "expected a file or folder of user" in done.stderr
    finally:
        file.unlink()


def test_a_folder_that_others_may_enter_is_refused(machine):
    machine.nfdt("stop")
    machine.warm.chmod(0o755)
    try:
        description_file(machine.warm).write_text("{}")
        description_file(machine.warm).chmod(0o600)
        done = machine.nfdt("stop")
        assert done.returncode == 2
        assert str(machine.warm) in done.stderr
    finally:
        machine.warm.chmod(0o700)
        description_file(machine.warm).unlink()


def test_another_backend_is_refused(machine):
    done = machine.nfdt("start", KERAS_BACKEND="jax")
    assert done.returncode == 2
    assert "'tensorflow'" in done.stderr
