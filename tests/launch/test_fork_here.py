"""A fork server that is forked from the process of a script, with real slots."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import psutil
import pytest

from tests.support.scripts import DEADLINE_S, NFDT, answer, environment

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os, signal, sys
import keras
import numpy as np
import psutil

def describe(process):
    files = {os.path.realpath(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
    return dict(pid=process.pid, name=process.name(), parent=process.ppid(), files=sorted(files),
                threads=process.num_threads())

class Looks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        found = [describe(p) for p in psutil.Process().children(recursive=True)]
        print(json.dumps(dict(pid=os.getpid(), found=found, own=os.path.realpath("/proc/self/fd/1"))), flush=True)
        if sys.argv[1:] == ["wait"]:
            signal.pause()

(np.ones((600, 600)) @ np.ones((600, 600)))  # the threads of OpenBLAS begin again
x = np.ones((64, 2), "f4")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=1, verbose=0, callbacks=[Looks()])
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return [*NFDT, "run", "--workers", "2", "--log-level", "info", str(tmp_path / "train.py")]


def run(command, **extra):
    done = subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=DEADLINE_S)
    return answer(done), done.stderr


def workers(seen):
    return [process for process in seen["found"] if process["name"].startswith("nfdt worker")]


def test_slots_of_nfdt_run_are_forked_from_the_process_of_the_script(command):
    seen, _ = run(command)
    (parent,) = {worker["parent"] for worker in workers(seen)}
    fork_server = next(process for process in seen["found"] if process["pid"] == parent)
    assert fork_server["parent"] == seen["pid"]
    assert fork_server["threads"] == 1
    assert len(workers(seen)) == 2
    for process in (fork_server, *workers(seen)):
        assert seen["own"] not in process["files"]  # who reads the script's output reads its end


@pytest.mark.long
def test_where_a_thread_runs_the_job_server_starts_its_own_fork_server(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, threading\n"
        "if 'train.py' in ' '.join(sys.orig_argv):\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    seen, messages = run(command, PYTHONPATH=path)
    assert "not forked from this process, because something that it imported has started threads (Thread-1" in messages
    (parent,) = {worker["parent"] for worker in workers(seen)}
    fork_server = next(process for process in seen["found"] if process["pid"] == parent)
    assert fork_server["parent"] != seen["pid"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_that_is_killed_leaves_no_process(command, number):
    script = subprocess.Popen([*command, "wait"], env=environment(), stdout=subprocess.PIPE, text=True)
    processes = [psutil.Process(p["pid"]) for p in json.loads(script.stdout.readline())["found"]]
    assert len(processes) >= 4
    script.send_signal(number)
    script.communicate(timeout=DEADLINE_S)
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]
