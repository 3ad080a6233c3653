"""End of a rig: nothing remains, however its owner ends; and the messages where no rig can be made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.machines import Rig, RigError
from tests.support.machines.members import members
from tests.support.machines.plan import PREFIX, namespace_of

ROOT = Path(__file__).parents[2]
OWNER = """
import json, os, signal, sys
from tests.support.machines import Rig
from tests.support.machines.plan import namespace_of
with Rig(2, rate_mbit=100, cpus=0.5) as rig:
    rig[0].popen(["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"])
    plans = [machine.plan for machine in rig]
    traces = {"namespaces": [namespace_of(plan.holder) for plan in plans], "groups": [plan.cgroup for plan in plans]}
    if os.fork() == 0:  # keeps the pipe to the keeper open
        signal.pause()
    print(json.dumps(traces), flush=True)
    signal.pause()
"""


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def mounts() -> str:
    return "".join(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if PREFIX in line)


@pytest.fixture
def owner(machines, tmp_path):
    """Start a process that owns a rig; return it with the traces of the rig."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    yield process, json.loads(process.stdout.readline())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_remains_after_the_end_of_the_owner(owner, number, tmp_path):
    process, traces = owner
    assert eventually(lambda: len(members(traces["namespaces"])) == 5)  # two holders and the three of the family
    assert all(Path(group).is_dir() for group in traces["groups"])
    process.send_signal(number)
    process.wait(30)
    assert eventually(lambda: members(traces["namespaces"]) == [])
    assert eventually(lambda: not any(Path(group).exists() for group in traces["groups"]))
    assert eventually(lambda: list(tmp_path.iterdir()) == [])
    assert mounts() == ""


def test_nothing_remains_after_a_failure(machines, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = interfaces()

    def fail():
        with Rig(2, rate_mbit=100) as rig:
            started.append(rig[1].popen(["sleep", "1000"]))
            namespaces.extend(namespace_of(machine.plan.holder) for machine in rig)
            raise ZeroDivisionError

    started, namespaces = [], []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].returncode == -signal.SIGKILL
    assert members(namespaces) == []
    assert interfaces() == before
    assert mounts() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_rig_that_cannot_be_built_leaves_nothing_and_gives_the_reason(machines, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RigError, match="/no/such/folder"):
        machines(2, private=["/no/such/folder"])
    assert list(tmp_path.iterdir()) == []


def without_tools(tmp_path: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a test of the rig where the tools are missing."""
    bare = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    test = "tests/machines/test_rig.py::test_machines_may_be_named"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", test],
        cwd=ROOT,
        env={**bare, "PATH": str(tmp_path), **extra},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_tests_without_machines_are_named_at_the_end(tmp_path):
    done = without_tools(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 tests were not run. They need machines: missing packages: iproute2 mount util-linux" in done.stdout
    assert "  tests/machines/test_rig.py::test_machines_may_be_named\n" in done.stdout


def test_tests_without_machines_fail_on_ci(tmp_path):
    done = without_tools(tmp_path, CI="true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "machines: missing packages: iproute2 mount util-linux" in done.stdout


def test_the_command_makes_machines_that_a_shell_enters(machines, tmp_path):
    command = [sys.executable, "-m", "tests.support.machines"]
    options = {"cwd": ROOT, "env": {**os.environ, "TMPDIR": str(tmp_path), "SHELL": shutil.which("sh")}, "text": True}
    up = subprocess.Popen([*command, "up", "2", "--rate", "1000"], stdout=subprocess.PIPE, **options)
    try:
        lines = [up.stdout.readline().split() for _ in range(3)]
        assert [line[:2] for line in lines[:2]] == [["node0", "10.77.0.1"], ["node1", "10.77.0.2"]]
        assert lines[1][2:] == ["scripts/machines", "shell", "node1"]
        inside = subprocess.run(
            lines[1][2:] and [*command, *lines[1][3:]], input="hostname", capture_output=True, **options
        )
        assert inside.stdout == "node1\n", inside.stderr
        named = subprocess.run([*command, "shell", "node0", "hostname"], capture_output=True, **options)
        assert named.stdout == "node0\n", named.stderr
        wrong = subprocess.run([*command, "shell", "node7"], capture_output=True, **options)
        assert "the machines are node0, node1" in wrong.stderr
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
        up.stdout.close()
    assert list(tmp_path.iterdir()) == []
    gone = subprocess.run([*command, "shell", "node0"], capture_output=True, **options)
    assert "scripts/machines up 2" in gone.stderr
