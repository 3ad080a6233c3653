"""Faults on real small processes, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nfdt.chaos.processes import ClusterProcess
from nfdt.chaos.relay import Rule
from nfdt.chaos.schedule import PlannedFault, parse_schedule, plan_faults
from nfdt.chaos.trial import Injector

LIMIT_S = 120
# For each line of its input it writes to its file, and prints how that went.
WRITER = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    try:
        with open(sys.argv[1], "a") as file:
            file.write(line)
        print("written", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


class SmallCluster:
    """Cluster of processes that write to a file, with the interface that an injector uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, list[subprocess.Popen]] = {}
        self.listens = True
        self.relays = {"worker": RecordingRelay(), "client": RecordingRelay()}
        self.start("worker")
        self.start("worker")
        self.start_server()
        self.start_script()

    def start(self, role: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", WRITER, str(self._folder / role)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        process.stdout.readline()
        self._started.setdefault(role, []).append(process)

    def start_server(self) -> None:
        self.start("server")

    def start_script(self) -> None:
        self.start("client")

    def processes(self, role: str) -> list[ClusterProcess]:
        live = [one for one in self._started[role] if one.poll() is None]
        return [ClusterProcess(role, index, psutil.Process(one.pid)) for index, one in enumerate(live)]

    def exit_code(self, role: str) -> int | None:
        return self._started[role][-1].poll()

    def write(self, role: str) -> str:
        """Let a process write to its file, and return how that went."""
        process = self._started[role][-1]
        process.stdin.write("x" * 100 + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    def ends(self, role: str) -> int:
        """Wait for the end of the first process of a role and return its exit code."""
        return self._started[role][0].wait(LIMIT_S)

    def stop(self) -> None:
        for process in [one for role in self._started.values() for one in role]:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


class RecordingRelay:
    def __init__(self) -> None:
        self.rules: dict[int, Rule | None] = {}

    def set_rule(self, number: int, rule: Rule | None) -> None:
        self.rules[number] = rule


@pytest.fixture
def cluster(tmp_path):
    cluster = SmallCluster(tmp_path)
    yield cluster
    cluster.stop()


@pytest.fixture
def clock(monkeypatch):
    """Provide a clock for the ends of faults, as a list with the time."""
    now = [1000.0]
    monkeypatch.setattr("nfdt.chaos.trial.time.monotonic", lambda: now[0])
    return now


def fault(text: str) -> PlannedFault:
    (planned,) = plan_faults(parse_schedule(f"cluster.tls = true\n[[fault]]\nat_s = 0\n{text}"))
    return planned


def test_a_kill_ends_the_chosen_process(cluster):
    injector = Injector(cluster)
    injection = injector.inject(fault('kind = "kill"\nrole = "worker"\ntarget = 0'))
    assert injection.target.index == 0
    assert cluster.ends("worker") == -signal.SIGKILL
    assert len(cluster.processes("worker")) == 1


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)])
@pytest.mark.parametrize("role", ["server", "client"])
def test_a_server_and_a_script_are_started_again_after_a_pause(cluster, clock, kind, number, role):
    injector = Injector(cluster)
    assert injector.inject(fault(f'kind = "{kind}"\nrole = "{role}"\nseconds = 5')) is not None
    assert cluster.ends(role) == -number
    injector.poll()
    assert injector.expects_end(role)
    assert injector.inject(fault(f'kind = "kill"\nrole = "{role}"')) is None, "there is nothing to kill"
    clock[0] += 4.9
    injector.poll()
    assert cluster.processes(role) == []
    clock[0] += 0.2
    injector.poll()
    assert len(cluster.processes(role)) == 1
    assert not injector.expects_end(role)


def test_a_process_that_ended_by_itself_is_not_expected_to_end(cluster):
    injector = Injector(cluster)
    cluster.processes("server")[0].process.kill()
    cluster.ends("server")
    assert not injector.expects_end("server")


def test_a_stalled_process_goes_on_after_its_time(cluster, clock):
    injector = Injector(cluster)
    injection = injector.inject(fault('kind = "stall"\nrole = "client"\nseconds = 2'))
    os.waitid(os.P_PID, injection.target.process.pid, os.WSTOPPED)
    clock[0] += 2.1
    injector.poll()
    assert cluster.write("client") == "written"


def test_a_full_disk_fails_writes_until_its_end(cluster, clock):
    injector = Injector(cluster)
    assert cluster.write("server") == "written"
    assert injector.inject(fault('kind = "fill_disk"\nrole = "server"\nseconds = 2')) is not None
    assert cluster.write("server") == "OSError"
    clock[0] += 2.1
    injector.poll()
    assert cluster.write("server") == "written"


def test_the_disk_is_full_only_for_a_server_that_has_started(cluster):
    cluster.listens = False
    assert Injector(cluster).inject(fault('kind = "fill_disk"\nrole = "server"\nseconds = 2')) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('kind = "cut"\nseconds = 2', {"cut": True}),
        ('kind = "slow"\nseconds = 2\nmbit = 3\ndelay_ms = 40', {"mbit": 3.0, "delay_ms": 40.0}),
    ],
)
def test_a_link_is_damaged_for_a_time(cluster, clock, text, expected):
    injector, relay = Injector(cluster), cluster.relays["worker"]
    injection = injector.inject(fault(f'role = "worker"\ntarget = 1\n{text}'))
    assert relay.rules == {1: Rule(pids=(injection.target.process.pid,), **expected)}
    clock[0] += 2.1
    injector.poll()
    assert relay.rules == {1: None}


def test_a_byte_is_corrupted_at_the_drawn_place(cluster):
    planned = fault('kind = "corrupt"\nrole = "client"')
    Injector(cluster).inject(planned)
    assert cluster.relays["client"].rules[1].flip == planned.draw


def test_a_fault_without_a_target_is_not_injected(cluster):
    cluster.processes("client")[0].process.kill()
    cluster.ends("client")
    injector = Injector(cluster)
    assert injector.inject(fault('kind = "kill"\nrole = "client"')) is None
    assert injector.injections == []
