"""Commands and programs of the documentation, run page by page as a reader would on one machine."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from tests.support.script_fork_server import ScriptForkServer
from tests.support.scripts import environment

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s)#(?:\s.*)?$")
SHELL = frozenset("><|&;()")
OWN_SERVER = re.compile(r"mpirun|emulate|^hfdt|^nfdt (start|stop)|--ui")  # commands that use none that runs already
DEADLINE_S = 150

SCRIPT = """
import argparse
import keras
import numpy as np

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=1)
epochs = options.parse_args().epochs
keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(512, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=16, epochs=epochs, validation_data=(x[:64], y[:64]), verbose=0)
print("trained", epochs)
"""

SERVER = "nfdt server --listen 127.0.0.1:7777 --workers 4 --ui 127.0.0.1:7778 --token-file token"
PRELUDE = """
import keras, nfdt
import numpy as np

x = np.random.default_rng(1).normal(size=(256, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("float32")
model, other = (keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]) for _ in range(2))
model.compile("sgd", "mse")
other.compile("sgd", "mse")
"""
CLUSTER = "[[workers]]\ncount = 2\nstep_ms = 20\n\n[[workers]]\nstep_ms = 80\n"


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: Path of the page, relative to the repository.
        language: ``bash`` or ``python``.
        text: The code.
    """

    page: str
    language: str
    text: str

    def commands(self) -> list[str]:
        """Return the lines of a bash block without comments; a line that ends in a backslash goes on in the next."""
        lines = (COMMENT.sub("", line).strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line]


def blocks() -> Iterator[Block]:
    """Yield the blocks of all pages."""
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            yield Block(str(page.relative_to(ROOT)), language, text)


def commands_by_page() -> dict[str, list[str]]:
    """Return the commands of each page in their order."""
    found: dict[str, list[str]] = {}
    for block in blocks():
        if block.language == "bash":
            found.setdefault(block.page, []).extend(block.commands())
    return found


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_fashion_mnist(keras_home: Path) -> None:
    """Write images of noise in the format and place of Fashion-MNIST, so that Keras downloads nothing."""
    folder = keras_home / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 256), ("t10k", 64)):
        images = draw.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        )
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">II", 2049, count) + labels.tobytes())
        )


@dataclass
class Reader:
    """A reader who follows one page in a folder of their own.

    Attributes:
        folder: Working directory, with scripts, a described cluster and the examples.
        scripts: Process from which commands that train are forked, with Keras imported.
        ports: Free ports in place of those that the pages name.
        variables: Environment of the commands.
        server: Variables that name the server which the page has started, for commands without ``--server``.
        running: Processes in the background.
        job: Job in place of ``ID``.
    """

    folder: Path
    scripts: ScriptForkServer
    ports: Mapping[str, int] = field(default_factory=lambda: {"7777": free_port(), "7778": free_port()})
    variables: dict[str, str] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    job: str = ""

    def __post_init__(self) -> None:
        for name in ("script.py", "train.py", "project/train.py"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(SCRIPT)
        (self.folder / "nfdt_command.py").write_text("from nfdt.cli import main\nmain()\n")
        (self.folder / "cluster.toml").write_text(CLUSTER)
        discovered = self.folder / "discover.sh"
        discovered.write_text("#!/bin/sh\necho 127.0.0.1:1\necho 127.0.0.01:1\n")
        discovered.chmod(0o755)
        (self.folder / "examples").symlink_to(ROOT / "examples")
        (self.folder / "deploy").symlink_to(ROOT / "deploy")
        binaries = self.folder / "bin"
        binaries.mkdir()
        for name, entry in (("nfdt", "main"), ("hfdt", "hfdt_main")):
            command = binaries / name
            command.write_text(f"#!{sys.executable}\nfrom nfdt.cli import {entry}\n{entry}()\n")
            command.chmod(0o755)
        self.variables |= {
            "PATH": os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
            "HOME": str(self.folder),  # the default folder of a server's state is there
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # compiled loops
            "BROWSER": "true",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }

    def follow(self, command: str) -> None:
        """Run a command; one that serves goes on in the background.

        Raises:
            AssertionError: the command fails, or does not end in time.
        """
        line = self._with_values(command)
        words = shlex.split(line)
        if words[0] == "export":
            self.variables |= dict([words[1].split("=", 1)])
        elif words[:2] in (["nfdt", "server"], ["nfdt", "worker"]):
            self._serve(words, command)
        elif words[:3] == ["nfdt", "jobs", "resume"]:
            resumed = self._run(line, command).split()[-1]
            self._run(f"nfdt jobs cancel {resumed}", command)
        elif words[:2] in (["nfdt", "run"], ["nfdt", "plan"], ["nfdt", "simulate"]) and not SHELL & set(line):
            self._train(words, command)
        else:
            self._run(line, command)

    def stop(self) -> None:
        """End what serves in the background."""
        for process in reversed(self.running):
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait(30)

    def run_program(self, text: str) -> None:
        """Run a Python program, behind lines that make a model and data."""
        path = self.folder / "program.py"
        path.write_text(PRELUDE + text)
        done = self.scripts.run(path, **self._variables())
        assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"

    def _with_values(self, command: str) -> str:
        """Return a command with values in place of hosts, ports and jobs."""
        line = command.replace("HOST:PORT", "HOST:7777")
        line = re.sub(r"\b(HOST|head|localhost|0\.0\.0\.0|127\.0\.0\.1)(?=:|\b)", "127.0.0.1", line)
        for stated, port in self.ports.items():
            line = line.replace(stated, str(port))
        if re.search(r"\bID\b", line):
            line = re.sub(r"\bID\b", self._job_for(line), line)
        return line

    def _variables(self, command: str = "") -> dict[str, str]:
        return {**self.variables, **({} if OWN_SERVER.search(command) else self.server)}

    def _run(self, line: str, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=environment(**self._variables(command)),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
        return done.stdout

    def _train(self, words: list[str], command: str) -> None:
        program = self.folder / "nfdt_command.py"
        done = self.scripts.run(program, *words[1:], **self._variables(command))
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"

    def _serve(self, words: list[str], command: str) -> None:
        """Start a server and wait until it listens, or a worker with the slots of two machines.

        Later commands of the page find the server by variables, as the pages explain.
        """
        log = (self.folder / "serve.log").open("a")
        if "--slots" in words:
            slots = words.index("--slots") + 1
            words[slots] = str(2 * int(words[slots]))
        process = subprocess.Popen(
            words, cwd=self.folder, env=environment(**self._variables()), stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.running.append(process)
        if words[1] == "server":
            assert process.stdout
            line = process.stdout.readline()
            assert "listening on" in line, f"{command}\n{(self.folder / 'serve.log').read_text()[-3000:]}"
            self.server["NFDT_SERVER"] = f"127.0.0.1:{self.ports['7777']}"
            for option, variable, found in (
                ("--token-file", "NFDT_TOKEN_FILE", "token"),
                ("--tls-cert", "NFDT_CA_FILE", "certs/ca.pem"),
            ):
                if option in words:
                    self.server[variable] = str(self.folder / found)
            if (self.folder / "certs").exists() and not (self.folder / "ca.pem").exists():
                (self.folder / "ca.pem").symlink_to(self.folder / "certs" / "ca.pem")

    def _job_for(self, line: str) -> str:
        """Return the job that a command is about: the newest one, or one that trains on meanwhile."""
        if not self.job:
            jobs = json.loads(self._run("nfdt jobs list --format json", "nfdt jobs list"))
            self.job = jobs[0]["job_id"] if jobs else self._run("nfdt run --detach script.py", line).strip()
        if re.search(" (cancel|plan) ", line):
            self.job = self._run("nfdt run --detach script.py --epochs 2000", line).strip()
            self._wait_for_an_epoch()
        return self.job

    def _wait_for_an_epoch(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        watched = subprocess.Popen(
            ["nfdt", "jobs", "logs", self.job, "-f"],
            cwd=self.folder,
            env=environment(**self._variables()),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watched.stdout
        for line in watched.stdout:
            if "epoch 2" in line or time.monotonic() > deadline:
                break
        watched.kill()
        watched.wait()
