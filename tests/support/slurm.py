"""A Slurm cluster on the machines of a rig: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.machines import Machine, MachineProcess, Rig, RigError

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
DEADLINE_S = 60
CONFIGURATION = """
ClusterName=rig
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.socket
CredType=cred/munge
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
ProctrackType={proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MinJobAge=3600
KillWait={kill_wait_s}
SlurmdTimeout={lost_s}
"""


def missing_packages() -> str:
    """Return which Debian packages this machine lacks for a cluster; empty if it has all of them."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program, path=_path()) is None]
    return f"missing packages: {' '.join(missing)}" if missing else ""


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmCluster:
    """Context manager of a cluster whose nodes are the machines of a rig; commands run on the first.

    All its files are in ``folder`` and in the machines' own folders, and all its processes are the rig's.

    Args:
        rig: The machines.
        folder: Folder that all machines share.
        cpus: Processors that each node offers; more than the machine has is possible.
        kill_wait_s: Time between SIGTERM and SIGKILL at the end of a job.
        lost_s: Time after which a silent node is down.
    """

    def __init__(self, rig: Rig, folder: Path, *, cpus: int = 8, kill_wait_s: int = 30, lost_s: int = 300) -> None:
        self._rig, self._folder = rig, folder
        self._daemons: list[MachineProcess] = []
        self._kill_wait_s, self._cpus, self._lost_s = kill_wait_s, cpus, lost_s

    def __enter__(self) -> SlurmCluster:
        own = self._rig[0].tmp / "slurm"  # its contents differ in each machine
        key, configuration = self._folder / "munge.key", self._folder / "slurm.conf"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        text = CONFIGURATION.format(
            first=self._rig[0],
            own=own,
            logs=self._folder,
            proctrack="proctrack/linuxproc",
            kill_wait_s=self._kill_wait_s,
            lost_s=self._lost_s,
        )
        nodes = [f"NodeName={m.name} NodeAddr={m.address} CPUs={self._cpus}\n" for m in self._rig]
        configuration.write_text(f"{text}{''.join(nodes)}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE\n")
        for machine in self._rig:
            machine.run(["mkdir", "-p", own / "state", own / "spool"])
            files = {"key-file": key, "log-file": self._folder / f"munged-{machine.name}.log"}
            files |= {"socket": own / "munge.socket", "pid-file": own / "munged.pid", "seed-file": own / "munge.seed"}
            names = [f"--{name}={path}" for name, path in files.items()]
            self._start(machine, ["munged", "--foreground", "--force", *names])
        self._start(self._rig[0], ["slurmctld", "-D", "-c", "-f", configuration])
        for machine in self._rig:
            self._start(machine, ["slurmd", "-D", "-f", configuration])
        self._await_nodes()
        return self

    def __exit__(self, *_) -> None:
        for daemon in reversed(self._daemons):  # slurmd's last messages need slurmctld, and both need munged
            daemon.terminate()
            daemon.wait(DEADLINE_S)

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the variables of a user of the cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NFDT_", "SLURM_"))}
        return {**kept, "SLURM_CONF": str(self._folder / "slurm.conf"), "TF_CPP_MIN_LOG_LEVEL": "3", **variables}

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 400,
        check: bool = True,
        cwd: Path | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first machine, with these additional variables."""
        return self._rig[0].run(command, env=self.environment(**variables), timeout=timeout, check=check, cwd=cwd)

    def show_job(self, job: str) -> Mapping[str, str]:
        """Return the fields of ``scontrol show job``; of a heterogeneous job, those of its first part."""
        words = self.run(["scontrol", "--oneliner", "show", "job", job]).stdout.splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_state(self, job: str, *states: str, restarts: int = 0, timeout_s: float = 400) -> Mapping[str, str]:
        """Wait until a job that was queued again so often has one of the states, and return its fields."""
        deadline = time.monotonic() + timeout_s
        while (fields := self.show_job(job))["JobState"] not in states or int(fields["Restarts"]) < restarts:
            if time.monotonic() > deadline:
                raise RigError(f"job {job} is {fields['JobState']} after {timeout_s} s, expected {' or '.join(states)}")
            time.sleep(0.2)
        return fields

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-2000:]}" for p in self._folder.glob("*.log"))

    def _start(self, machine: Machine, command: Sequence[str | Path]) -> None:
        self._daemons.append(machine.popen(command, env={**os.environ, "PATH": _path()}))

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            states = self.run(["sinfo", "--noheader", "--Node", "--format=%t"], check=False).stdout.split()
            if states == ["idle"] * len(self._rig):
                return
            ended = [d for d in self._daemons if d.poll() is not None]
            if ended or time.monotonic() > deadline:
                errors = "".join(d.error_output() for d in ended or self._daemons)
                raise RigError(f"the nodes are {states}, expected all idle\n{errors}\n{self.logs()}")
            time.sleep(0.1)
