"""Rig: several machines on one Linux box, from the side of the process that owns them."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from ipaddress import ip_network
from pathlib import Path

from tests.support.machines.machine import Machine
from tests.support.machines.plan import NETWORK, PREFIX, ROOT, MachinePlan, RigError, RigPlan

KEEPER = "from tests.support.machines.keeper import main; main()"
DEADLINE_S = 60
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))


class Rig:
    """Context manager of several machines; nothing of them remains after it, even if this process is killed.

    All machines share the file system, except ``/dev/shm``, ``/etc/hosts``, the folders named by ``HOME``,
    ``XDG_CACHE_HOME``, ``XDG_RUNTIME_DIR`` and ``TMPDIR``, and those given as ``private``.
    Process ids are shared as well. This process is in none of the machines: scripts run in one of them.

    Args:
        machines: Their number, or their names; the default names are ``node0``, ``node1`` and so on.
        rate_mbit: Rate of each machine's link in Mbit/s, in both directions.
        cpus: Processors that each machine may use, 0.5 for instance, or one such number per machine.
        private: Existing folders that are empty and separate in each machine.
        logs: Folder for the files of :meth:`Machine.popen`; by default one that is removed at the end.
    """

    def __init__(
        self,
        machines: int | Sequence[str],
        *,
        rate_mbit: float | None = None,
        cpus: float | Sequence[float | None] | None = None,
        private: Sequence[str | Path] = (),
        logs: Path | None = None,
    ) -> None:
        names = [f"node{i}" for i in range(machines)] if isinstance(machines, int) else list(machines)
        shares = list(cpus) if isinstance(cpus, Sequence) else [cpus] * len(names)
        if not 1 <= len(names) <= 250 or len(set(names)) < len(names) or len(shares) != len(names):
            raise RigError(f"1 to 250 machines of different names are possible, got {names} with processors {shares}")
        self._names = names
        self._rate = rate_mbit
        self._shares = shares
        self._private = tuple(map(str, private))
        self._logs = logs
        self._keeper: subprocess.Popen | None = None
        self._folder = ""
        self._machines: list[Machine] = []

    def __enter__(self) -> Rig:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._machines)

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __getitem__(self, key: int | str) -> Machine:
        """Return a machine by its place or its name."""
        return self._machines[key if isinstance(key, int) else self._names.index(key)]

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=PREFIX)
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, self._planned().text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
            text=True,
        )
        line = self._keeper.stdout.readline()
        if not line:
            keeper, self._keeper = self._keeper, None
            _, errors = keeper.communicate(timeout=DEADLINE_S)
            raise RigError(f"the machines cannot be made: {errors.strip()}")
        plan = RigPlan.parse(line)
        logs = self._logs or Path(plan.folder)
        self._machines = [Machine(plan, machine, logs) for machine in plan.machines]

    def _planned(self) -> RigPlan:
        groups = _cgroups() if any(self._shares) else None
        hosts = ip_network(NETWORK).hosts()
        token = secrets.token_hex(4)
        machines = [
            MachinePlan(
                name=name,
                address=str(next(hosts)),
                port=f"port{i}",
                rate_mbit=self._rate,
                cpus=share,
                cgroup=str(groups / f"{PREFIX}{token}-{i}") if groups and share else None,
            )
            for i, (name, share) in enumerate(zip(self._names, self._shares, strict=True))
        ]
        return RigPlan(os.getpid(), self._folder, tuple(machines), self._private)

    def close(self) -> None:
        """Kill all processes of all machines and remove the machines.

        Raises:
            RigError: Something remains.
        """
        keeper, self._keeper = self._keeper, None
        try:
            if keeper is not None:
                _, errors = keeper.communicate("end\n", timeout=DEADLINE_S)
                if keeper.returncode and self._machines:
                    raise RigError(f"the machines were not removed: {errors.strip()}")
        finally:
            for machine in self._machines:
                machine.collect()
            self._machines = []
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)


def _cgroups() -> Path:
    for folder in CGROUPS:
        controllers = folder / "cgroup.subtree_control"
        if (folder / "cpu.cfs_quota_us").exists() or (controllers.exists() and "cpu" in controllers.read_text()):
            if os.access(folder, os.W_OK):
                return folder
    raise RigError(
        "a limit of processors was asked for; expected a writable control group with the controller 'cpu' "
        f"(version 1 or 2) at {' or '.join(map(str, CGROUPS))}, found none; leave the limit out"
    )
