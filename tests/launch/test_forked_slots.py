"""Real slots, forked by the fork server of a launcher."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotOptions
from tests.support.hello_server import DEADLINE_S, TOKEN, HelloServer

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server():
    server = HelloServer()
    yield server
    server.stop()


def options(server, tmp_path, **kwargs):
    return SlotOptions(server.address, TOKEN, tmp_path / "logs", **kwargs)


@pytest.fixture
def launch(server, tmp_path):
    launchers = []

    def launch(**kwargs):
        launchers.append(LocalLauncher(options(server, tmp_path, **kwargs)))
        return launchers[-1]

    yield launch
    for launcher in launchers:
        launcher.stop()


def parent_of(pid):
    return psutil.Process(pid).parent()


def is_fork_server(process):
    return "nfdt.launch.fork_server" in process.cmdline() and parent_of(process.pid).pid == os.getpid()


def all_ended(processes):
    return not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


def test_slots_are_children_of_one_fork_server_and_outlive_each_other(launch, server):
    launcher = launch()
    launcher.ensure("worker", 2)
    launcher.ensure("shard", 1)
    hellos = [server.next() for _ in range(3)]
    assert sorted(hello.role for hello in hellos) == ["shard", "worker", "worker"]
    (fork_server,) = {parent_of(hello.pid) for hello in hellos}
    assert is_fork_server(fork_server)
    assert len(os.listdir(f"/proc/{fork_server.pid}/task")) == 1
    assert {psutil.Process(hello.pid).name() for hello in hellos} == {"nfdt worker 0", "nfdt worker 1", "nfdt shard 0"}
    assert set(launcher.pids) == {hello.pid for hello in hellos}

    os.kill(hellos[0].pid, signal.SIGKILL)
    replacement = server.next()
    assert replacement.role == hellos[0].role
    assert parent_of(replacement.pid) == fork_server
    assert set(launcher.pids) == {replacement.pid, hellos[1].pid, hellos[2].pid}

    processes = [fork_server, *fork_server.children()]
    launcher.stop()
    assert all_ended(processes)
    assert launcher.pids == []


def test_a_killed_fork_server_is_replaced_and_counts_as_one_crash(launch, server, tmp_path):
    launcher = launch()
    launcher.ensure("worker", 6)  # more than the tolerated number of crashes
    first = [server.next().pid for _ in range(6)]
    fork_server = parent_of(first[0])
    processes = [psutil.Process(pid) for pid in first]
    fork_server.kill()
    assert all_ended(processes)
    second = [server.next().pid for _ in range(6)]
    assert is_fork_server(parent_of(second[0]))
    assert parent_of(second[0]) != fork_server
    assert launcher.failure is None


def test_no_process_is_left_when_the_launcher_is_killed(server, tmp_path):
    program = f"""
        import signal
        from pathlib import Path
        from nfdt.launch.processes import LocalLauncher
        from nfdt.launch.slot_process import SlotOptions
        launcher = LocalLauncher(SlotOptions({server.address!r}, {TOKEN!r}, Path({str(tmp_path)!r})))
        launcher.ensure("worker", 2)
        signal.pause()
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    slots = [psutil.Process(server.next().pid) for _ in range(2)]
    fork_server = slots[0].parent()
    assert fork_server.ppid() == launcher.pid
    launcher.kill()
    launcher.wait(DEADLINE_S)
    assert all_ended([fork_server, *slots])


def test_stop_does_not_wait_for_imports(launch):
    launcher = launch()
    launcher.ensure("worker", 2)
    launcher.stop()
    assert not [p for p in psutil.Process().children() if "nfdt.launch.fork_server" in p.cmdline()]
    assert launcher.pids == []


def test_where_imports_start_threads_slots_are_started_without_a_fork_server(launch, server, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    launcher = launch(environment={"PYTHONPATH": path})
    launcher.ensure("worker", 1)
    assert parent_of(server.next().pid).pid == os.getpid()
    assert "one thread" in (tmp_path / "logs" / "fork-server.log").read_text()
    assert launcher.failure is None


def test_slots_with_gpus_are_not_forked(launch, server):
    launcher = launch(gpus=("0",))
    launcher.ensure("worker", 1)
    assert parent_of(server.next().pid).pid == os.getpid()


def test_forked_slots_that_crash_at_once_are_given_up(tmp_path, quick_restarts):
    launcher = LocalLauncher(SlotOptions("127.0.0.1:1", TOKEN, tmp_path, wait_s=0.0))
    launcher.ensure("worker", 1)
    assert launcher.given_up.wait(DEADLINE_S)
    launcher.stop()
    assert str(tmp_path) in launcher.failure
    logs = [path.read_text() for path in tmp_path.glob("worker-*.log")]
    assert all("127.0.0.1:1" in log for log in logs), logs
