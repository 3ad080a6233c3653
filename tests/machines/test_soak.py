"""Soaks on several machines: faults on small commands, and one job with fixed faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nfdt.chaos.processes import ClusterProcess
from nfdt.chaos.report import make_report
from tests.support.eventually import eventually
from tests.support.machine_programs import Conversation
from tests.support.scripts import environment
from tests.support.soak.draw import SCRIPT
from tests.support.soak.invariants import violations
from tests.support.soak.machine_injector import MachineInjector
from tests.support.soak.machine_schedule import parse_machine_schedule
from tests.support.soak.machine_trial import run_on_machines
from tests.support.soak.rows import FAULTS, JOBS, UNDISTURBED

HANG_S = 1200
SILENCE_S = 0.5
FIXED = """
[cluster]
workers = 2
shards = 1
options = { algorithm = "bsp", snapshot_s = 0.5, "emulate.step_ms" = 40 }

[[fault]]
kind = "power"
role = "shard"
at_s = 1
seconds = 2

[[fault]]
kind = "cut"
role = "worker"
target = 1
at_s = 4
seconds = 2
"""


class SmallMachines:
    """Machines whose commands do nothing, with the interface that an injector uses."""

    def __init__(self, rig) -> None:
        self._rig = rig
        self._running: dict[str, subprocess.Popen] = {}
        for machine in rig:
            self.start_command(machine.name)

    def start_command(self, name: str) -> None:
        self._running[name] = self._rig[name].popen(["sleep", "1000"])

    def machine(self, name: str):
        return self._rig[name]

    def commands(self, role: str) -> dict[str, ClusterProcess]:
        names = [name for name, one in self._running.items() if name.startswith(role) and one.poll() is None]
        return {
            name: ClusterProcess(role, index, psutil.Process(self._running[name].pid))
            for index, name in enumerate(names)
        }

    def processes(self, role: str) -> list[ClusterProcess]:
        return list(self.commands(role).values())

    def exit_code(self, name: str) -> int | None:
        return self._running[name].poll()

    def status(self, name: str) -> str:
        return psutil.Process(self._running[name].pid).status()


@pytest.fixture
def cluster(machines):
    return SmallMachines(machines(["server", "worker0", "worker1"]))


@pytest.fixture
def clock(monkeypatch):
    """Provide a clock for the ends of faults, as a list with the time."""
    now = [1000.0]
    monkeypatch.setattr("tests.support.soak.machine_injector.time.monotonic", lambda: now[0])
    return now


def fault(fields: str):
    (planned,) = parse_machine_schedule(f"[[fault]]\nat_s = 0\n{fields}").plan()
    return planned


@pytest.mark.parametrize("kind", ["power", "terminate"])
def test_a_machine_that_ended_is_started_again_after_a_pause(cluster, clock, kind):
    injector = MachineInjector(cluster)
    one = fault(f'kind = "{kind}"\nrole = "worker"\ntarget = 1\nseconds = 5')
    assert injector.inject(one).target.index == 1
    assert eventually(lambda: cluster.machine("worker1").processes() == [])
    assert injector.expects_end("worker1")
    assert not injector.expects_end("worker0")
    injector.poll()
    assert injector.inject(fault('kind = "cut"\nrole = "worker"\ntarget = 1\nseconds = 5')) is None
    clock[0] += 5.1
    injector.poll()
    assert not injector.expects_end("worker1")
    assert len(cluster.machine("worker1").processes()) == 1
    talk = Conversation(cluster.machine("worker1"), cluster.machine("server"))
    talk.say("back")
    assert talk.answer() == "back"


@pytest.mark.parametrize(
    "damage",
    ['kind = "cut"', 'kind = "lose"\npercent = 100', 'kind = "slow"\ndelay_ms = 60000'],
    ids=["cut", "lose", "slow"],
)
def test_a_link_is_damaged_for_a_time(cluster, clock, damage):
    injector = MachineInjector(cluster)
    talk = Conversation(cluster.machine("worker0"), cluster.machine("server"))
    talk.say("before")
    assert talk.answer() == "before"
    one = fault(f'{damage}\nrole = "server"\nseconds = 5')
    assert injector.inject(one).target.role == "server"
    talk.say("meanwhile")
    assert talk.answer(SILENCE_S) == ""
    assert injector.inject(one) is None, "one fault at a time"
    clock[0] += 5.1
    injector.poll()
    assert talk.answer() == "meanwhile"


def test_a_slow_link_has_the_rate(cluster, clock):
    injector = MachineInjector(cluster)
    assert injector.inject(fault('kind = "slow"\nrole = "server"\nseconds = 5\nmbit = 2.5')) is not None
    server = cluster.machine("server")
    assert "rate 2500Kbit" in server.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    clock[0] += 5.1
    injector.poll()
    assert "rate" not in server.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout


def test_a_process_is_stopped_for_a_time(cluster, clock):
    injector = MachineInjector(cluster)
    injector.inject(fault('kind = "stall"\nrole = "worker"\ntarget = 0\nseconds = 5'))
    assert eventually(lambda: cluster.status("worker0") == psutil.STATUS_STOPPED)
    assert cluster.status("worker1") != psutil.STATUS_STOPPED
    clock[0] += 5.1
    injector.poll()
    assert eventually(lambda: cluster.status("worker0") != psutil.STATUS_STOPPED)


def test_all_processes_of_a_machine_stand_still_for_a_time(cluster, clock):
    injector = MachineInjector(cluster)
    injector.inject(fault('kind = "pause"\nrole = "worker"\ntarget = 1\nseconds = 5'))
    assert eventually(lambda: cluster.status("worker1") == psutil.STATUS_STOPPED)
    assert cluster.status("worker0") != psutil.STATUS_STOPPED
    clock[0] += 5.1
    injector.poll()
    assert eventually(lambda: cluster.status("worker1") != psutil.STATUS_STOPPED)


def test_a_command_that_was_killed_is_started_again(cluster, clock):
    injector = MachineInjector(cluster)
    assert injector.inject(fault('kind = "kill"\nrole = "server"\nseconds = 5')) is not None
    assert eventually(lambda: cluster.exit_code("server") is not None)
    assert injector.inject(fault('kind = "kill"\nrole = "server"\nseconds = 5')) is None
    injector.poll()
    clock[0] += 5.1
    injector.poll()
    assert cluster.exit_code("server") is None


@pytest.mark.long
@pytest.mark.machines
@pytest.mark.timeout(HANG_S)
def test_a_job_outlives_the_loss_of_a_shard_s_machine_and_a_cut_link(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    record = run_on_machines(FIXED, script, tmp_path / "trial")
    report = make_report(record)
    assert violations(report, record.jobs, 0.95) == []
    assert [(fault.kind, fault.role, fault.survived) for fault in report.faults] == [
        ("power", "shard", True),
        ("cut", "worker", True),
    ]
    assert any(event.kind == "shard_lost" for event in record.jobs[0].events)


@pytest.mark.long
@pytest.mark.machines
@pytest.mark.timeout(HANG_S)
def test_the_command_runs_one_job_and_removes_its_machines(tmp_path):
    command = [sys.executable, "-m", "tests.support.soak", "--machines", "--seed", "1", "--job", "1"]
    done = subprocess.run(
        [*command, "--logs", tmp_path / "soak"],
        cwd=Path(__file__).parents[2],
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {FAULTS, JOBS, UNDISTURBED} <= {path.name for path in (tmp_path / "soak").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["soak"]
