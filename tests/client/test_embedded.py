"""The child process of the embedded server, played by small scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from nfdt_client import embedded
from nfdt_client.embedded import EmbeddedServer

from nfdt.core.errors import ServerUnreachable

ANSWERS = 'import json, sys; t = sys.stdin.readline().strip(); print(json.dumps({"address": t[:8] + ":1"}), flush=True)'


def server(script: str) -> EmbeddedServer:
    return EmbeddedServer(2, 1, command=[sys.executable, "-c", script])


def test_it_gets_its_token_by_stdin_and_ends_when_that_closes():
    child = server(f"{ANSWERS}; sys.stdin.read()")
    child.start()
    process, directory = psutil.Process(child._process.pid), child._directory
    assert child.token not in " ".join(process.cmdline())
    assert child.address() == f"{child.token[:8]}:1"
    child.check()
    child.stop()
    assert not process.is_running()
    assert not Path(directory).exists()
    child.stop()


def test_one_that_does_not_listen_is_terminated_then_killed(monkeypatch):
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(embedded, "KILL_TIMEOUT_S", 0.2)
    child = server(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ANSWERS}; signal.pause()")
    child.start()
    child.address()
    process = psutil.Process(child._process.pid)
    child.stop()
    assert not process.is_running()


def test_a_failed_start_shows_the_end_of_its_log():
    child = server("raise RuntimeError('no such module')")
    child.start()
    with pytest.raises(ServerUnreachable, match="no such module"):
        child.address()
    child._process.wait()
    with pytest.raises(ServerUnreachable, match="exit code 1"):
        child.check()
    child.stop()


def test_one_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.2)
    child = server("import sys; sys.stdin.read()")
    child.start()
    with pytest.raises(ServerUnreachable, match="within"):
        child.address()
    child.stop()
