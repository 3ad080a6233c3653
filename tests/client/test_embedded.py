"""Child process of the embedded server, replaced by small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from nfdt_client import embedded
from nfdt_client.connection import JobsClient
from nfdt_client.embedded import EmbeddedServer

from nfdt.core.errors import PolicyRefused, ServerUnreachable

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


def test_workers_of_other_machines_get_a_token_that_may_not_train():
    started = EmbeddedServer(0, 0)
    started.start()
    try:
        with closing(JobsClient(started.address(), started.token)) as script:
            assert script.list() == []
        with closing(JobsClient(started.address(), started.worker_token)) as thief:
            thief.describe()
            with pytest.raises(PolicyRefused, match="whose role is work"):
                thief.list()
    finally:
        started.stop()


def test_one_that_does_not_listen_is_terminated_then_killed(monkeypatch):
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(embedded, "KILL_TIMEOUT_S", 0.2)
    child = server(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ANSWERS}; signal.pause()")
    child.start()
    child.address()
    process = psutil.Process(child._process.pid)
    child.stop()
    assert not process.is_running()


def test_one_whose_memory_is_freed_slowly_is_no_error():
    """Regression: a script that had trained tables of 10 GB ended with an error."""

    class Freed:
        stdin, killed = None, False

        def wait(self, timeout_s):
            raise subprocess.TimeoutExpired("server", timeout_s)

        def poll(self):
            return None

        def terminate(self):
            pass

        def kill(self):
            self.killed = True

    process = Freed()
    embedded._end(process)
    assert process.killed


def test_a_failed_start_shows_the_end_of_its_log():
    child = server("raise RuntimeError('no such module')")
    child.start()
    with pytest.raises(ServerUnreachable, match="no such module"):
        child.address()
    child._process.wait()
    with pytest.raises(ServerUnreachable, match="exit code 1"):
        child.check()
    child.stop()


def test_a_server_that_reports_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.2)
    child = server("import sys; sys.stdin.read()")
    child.start()
    with pytest.raises(ServerUnreachable, match="within"):
        child.address()
    child.stop()


SCRIPT = """
import signal
from nfdt_client.embedded import EmbeddedServer
server = EmbeddedServer(0, 0)
server.start()
server.address()
print(server._process.pid, server._directory, flush=True)
signal.pause()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Provide the directory for temporary files of this process and of scripts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def script(temporary):
    """Provide a running script and the process of its own, real server."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    pid, folder = process.stdout.readline().split()
    assert list(temporary.iterdir()) == [Path(folder)]
    yield process, psutil.Process(int(pid))
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_is_killed_by_a_signal_leaves_nothing(script, temporary, number):
    process, child = script
    process.send_signal(number)
    assert process.wait() == -number
    assert not psutil.wait_procs([child], timeout=60)[1]
    assert list(temporary.iterdir()) == []


def test_what_a_script_and_its_server_leave_when_both_are_killed_is_removed_by_the_next_start(script, temporary):
    process, child = script
    child.kill()
    process.kill()
    assert not psutil.wait_procs([child], timeout=60)[1]
    process.wait()
    (left,) = temporary.iterdir()
    following = server("")
    following.start()
    assert not left.exists()
    assert following._directory.exists()
    following.stop()
    assert list(temporary.iterdir()) == []


def test_a_server_that_lives_keeps_its_folder_when_another_one_starts(script, temporary):
    (kept,) = temporary.iterdir()
    other = server("")
    other.start()
    other.stop()
    assert list(temporary.iterdir()) == [kept]


def test_the_log_is_its_owners_only(temporary):
    child = server("")
    before = os.umask(0)
    try:
        child.start()
    finally:
        os.umask(before)
    assert child._log_file.stat().st_mode & 0o777 == 0o600
    child.stop()


def test_servers_one_after_the_other_leave_no_descriptor_thread_or_folder(temporary):
    def run():
        child = server(f"{ANSWERS}; sys.stdin.read()")
        child.start()
        child.address()
        child.stop()
        assert list(temporary.iterdir()) == []
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    descriptors, threads = run()
    more_descriptors, more_threads = run()
    assert more_descriptors <= descriptors  # fewer where something of an earlier test has ended meanwhile
    assert more_threads <= threads
