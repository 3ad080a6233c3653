"""State that commands leave behind when a signal ends them, and its detection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.scripts import environment

WAITS = """
import time
from nfdt.cli.process import end_as_killed
end_as_killed()
try:
    print("waits", flush=True)
    while True:
        time.sleep(0.1)  # a signal just before a longer wait would be seen after it only
finally:
    print("cleaned up", flush=True)
"""
GRACE = """
import time
from nfdt.cli.process import end_in_order
ending = end_in_order()
try:
    print("waits", flush=True)
    while not ending.is_set():
        time.sleep(0.1)
    print("ends in order", flush=True)
    while True:
        time.sleep(0.1)
finally:
    print("cleaned up", flush=True)
"""
SCRIPT = """
import time
print("waits", flush=True)
while True:
    time.sleep(0.1)
"""


def start(*command, **options):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout.readline() == "waits\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_ended_cleans_up_and_names_the_signal(number, code):
    process = start(sys.executable, "-c", WAITS)
    process.send_signal(number)
    assert process.communicate()[0] == "cleaned up\n"
    assert process.returncode == code


def test_a_second_sigterm_ends_a_command_that_ends_in_order():
    process = start(sys.executable, "-c", GRACE)
    process.terminate()
    assert process.stdout.readline() == "ends in order\n"
    process.terminate()
    assert process.communicate()[0] == "cleaned up\n"
    assert process.returncode == 0


def test_a_command_under_nohup_outlives_its_terminal():
    process = start("nohup", sys.executable, "-c", WAITS, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    process.terminate()
    process.communicate()
    assert process.returncode == 143


@pytest.mark.processes
def test_rank_0_of_mpi_that_is_terminated_leaves_nothing_and_is_no_success(tmp_path):
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(SCRIPT)
    temporary.mkdir()
    world = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    process = start(
        *(sys.executable, "-m", "nfdt.cli", "mpi", script),
        env=environment(TMPDIR=str(temporary), XDG_RUNTIME_DIR=str(temporary), **world),
        stderr=subprocess.DEVNULL,
    )
    assert [name for name in os.listdir(temporary) if name.startswith("nfdt-")]
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert not [path for path in temporary.rglob("*") if path.is_file()]
