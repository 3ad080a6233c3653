"""Signals that reach one process only, and slots found among the descendants of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from nfdt.chaos.processes import MARK, find_slots, is_alive, marked, send_signal

TITLED = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'nfdt worker 3'); print(flush=True); sys.stdin.read()"
PARENT = f"""
import subprocess, sys
run = lambda *more: subprocess.Popen([sys.executable, "-c", {TITLED!r}, *more], stdin=subprocess.PIPE)
plain = "import sys; print(flush=True); sys.stdin.read()"
slot = [sys.executable, "-c", plain, "--role", "shard", "--name", "local-shard-1-abc123", "--host", "x"]
children = [run(), subprocess.Popen(slot, stdin=subprocess.PIPE)]
sys.stdin.read()
"""


@pytest.fixture
def start():
    """Start a Python program that prints a line when it is ready, and ends with its standard input."""
    started = []

    def run(source: str, lines: int = 1, **variables: str) -> subprocess.Popen:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", source], stdin=pipe, stdout=pipe, env={**os.environ, **variables}
        )
        started.append(process)
        for _ in range(lines):
            process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


WAITING = "import sys; print(flush=True); sys.stdin.read()"


def test_a_signal_reaches_the_process(start):
    process = start(WAITING)
    assert send_signal(psutil.Process(process.pid), signal.SIGKILL)
    assert process.wait(120) == -signal.SIGKILL


def test_a_process_that_has_ended_gets_no_signal(start):
    process = start(WAITING)
    seen = psutil.Process(process.pid)
    process.kill()
    process.wait(120)
    assert not send_signal(seen, signal.SIGKILL)
    assert not is_alive(seen)


def test_a_zombie_is_no_process(start):
    process = start(WAITING)
    seen = psutil.Process(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(seen)
    assert not send_signal(seen, signal.SIGTERM)


def test_another_process_with_the_same_number_gets_no_signal(start):
    process = start(WAITING)
    seen = psutil.Process(process.pid)
    seen._ident = (process.pid, 0.0)  # as of a process that started at another time
    assert not send_signal(seen, signal.SIGKILL)
    assert process.poll() is None


def test_slots_are_found_by_title_and_by_command_line(start):
    parent = start(PARENT, lines=2)
    start(TITLED)  # beside, not below
    found = find_slots(psutil.Process(parent.pid))
    assert [(one.role, one.index, str(one)) for one in found] == [("shard", 1, "shard 1"), ("worker", 3, "worker 3")]
    assert all(one.process.ppid() == parent.pid for one in found)


def test_a_parent_that_has_ended_has_no_slots(start):
    parent = start(WAITING)
    seen = psutil.Process(parent.pid)
    parent.kill()
    parent.wait(120)
    assert find_slots(seen) == []


def test_processes_are_found_by_their_mark(start):
    first = start(WAITING, **{MARK: "one"})
    start(WAITING, **{MARK: "two"})
    assert [process.pid for process in marked("one")] == [first.pid]
