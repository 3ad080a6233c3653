"""Remains of a trial: found, and processes among them ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nfdt.chaos import processes
from nfdt.chaos.processes import MARK, find_leftovers, shared_memory_segments


@pytest.fixture(autouse=True)
def _at_once(monkeypatch, tmp_path):
    """Wait for nothing, and look for shared memory in a folder of the test."""
    monkeypatch.setattr(processes, "SETTLE_S", 0.0)
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "tmp").mkdir()


def test_nothing_is_left_of_nothing(tmp_path):
    assert find_leftovers("mark-of-none", tmp_path / "tmp", ["127.0.0.1:1"], ()) == []


def test_a_process_that_is_left_is_named_and_ended(tmp_path):
    code = "import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, MARK: "left"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    (found,) = find_leftovers("left", tmp_path / "tmp", [], ())
    assert found.startswith(f"process {process.pid} ")
    assert process.wait(120) < 0
    process.communicate()


def test_files_are_named_but_for_those_of_others(tmp_path):
    for name in ("nfdt-abc", "__autograph_generated_file1.py"):
        (tmp_path / "tmp" / name).touch()
    assert find_leftovers("none", tmp_path / "tmp", [], ()) == ["file nfdt-abc"]


def test_segments_are_those_that_are_new_and_in_no_use(tmp_path):
    shared = tmp_path / "shm"
    (shared / "old").touch()
    before = shared_memory_segments()
    (shared / "new").touch()
    assert find_leftovers("none", tmp_path / "tmp", [], before) == ["segment new"]


def test_segments_of_live_processes_are_not_left(tmp_path, monkeypatch):
    shared = Path("/dev/shm")
    monkeypatch.setattr(processes, "SHARED_MEMORY", shared)
    before = shared_memory_segments()
    name = f"nfdt-test-{os.getpid()}"
    code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(); sys.stdin.read()"
    (shared / name).write_bytes(bytes(4096))
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code, str(shared / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdout.readline()
        assert f"segment {name}" not in find_leftovers("none", tmp_path / "tmp", [], before)
        process.communicate()
        assert f"segment {name}" in find_leftovers("none", tmp_path / "tmp", [], before)
    finally:
        (shared / name).unlink()


def test_an_open_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert find_leftovers("none", tmp_path / "tmp", [address], ()) == [f"port {address}"]
