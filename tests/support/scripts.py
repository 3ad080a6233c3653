"""Servers, workers and scripts in separate processes, as a user starts them."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

OTHER_BACKENDS = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
NFDT = [sys.executable, "-m", "nfdt.cli"]
DEADLINE_S = 240

DIGITS = """
import json, sys
import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype("float32")

def build(optimizer=None):
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10, activation="softmax"),
    ])
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""


def answer(done) -> dict:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def environment(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NFDT_")}
    ours = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", "NFDT_WARM": "false"}  # no server of the user
    return {**inherited, **ours, **extra}


@dataclass
class ServerProcess:
    """Server process with its slots."""

    address: str
    token_file: Path
    process: subprocess.Popen
    state_dir: Path

    def env(self) -> dict[str, str]:
        return {"NFDT_SERVER": self.address, "NFDT_TOKEN_FILE": str(self.token_file)}


def descendants(pid: int, word: str = "") -> list[psutil.Process]:
    """Return the live descendants of a process whose command line contains ``word``."""
    return [p for p in psutil.Process(pid).children(recursive=True) if not word or word in _command_line(p)]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also a zombie
        return ""


def start_server(directory: Path, *options: str, **variables: str) -> ServerProcess:
    """Start a job server; another one with the same directory has the same token and state."""
    token_file = directory / "token"
    if not token_file.exists():
        token_file.write_text(secrets.token_hex(16))
        token_file.chmod(0o600)
    process = subprocess.Popen(
        [*NFDT, "server", "--listen", "127.0.0.1:0", "--state-dir", str(directory / "state")]
        + ["--token-file", str(token_file), *options],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=(directory / "server.log").open("a"),
        text=True,
    )
    line = process.stdout.readline()
    assert ":" in line, (directory / "server.log").read_text()
    return ServerProcess(line.split()[-1].strip(), token_file, process, directory / "state")


def start_workers(cluster: ServerProcess, slots: int, *options: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*NFDT, "worker", "--server", cluster.address, "--slots", str(slots), *options],
        env=environment(NFDT_TOKEN_FILE=str(cluster.token_file), **variables),
        stdout=subprocess.DEVNULL,
        stderr=(cluster.state_dir.parent / "worker.log").open("w"),
    )


@contextmanager
def submitted(cluster: ServerProcess, *arguments: str) -> Iterator[str]:
    """Run ``nfdt run --detach`` and yield the job's name once it is printed, which is before the command has ended.

    On a busy machine the end of its process takes seconds, in which the job trains.
    """
    command, env = [*NFDT, "run", "--detach", *arguments], environment(**cluster.env())
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        job = process.stdout.readline().strip()
        assert job.startswith("job-"), "the command's messages are above"
        yield job
        assert process.wait(DEADLINE_S) == 0


def stop(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(DEADLINE_S)
