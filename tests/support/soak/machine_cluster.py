"""Cluster of a trial on the machines of a rig: each command of a user on a machine of its own, all links with TLS."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from nfdt.chaos.cluster import END_S, JOB, POLL_S, START_S, TAIL
from nfdt.chaos.processes import FOREIGN, SETTLE_S, ClusterProcess, describe_process, find_slots, is_alive
from nfdt.chaos.schedule import ClusterRow, TargetRole
from nfdt.core.errors import NfdtError
from tests.support.cluster_of_machines import Credentials
from tests.support.machines import Machine, MachineProcess, Rig
from tests.support.scripts import NFDT, environment

PORT = 7777
SLOTS = {"worker": ("--slots", "1"), "shard": ("--slots", "0", "--shards", "1")}


def machine_names(row: ClusterRow) -> list[str]:
    """Return the names of the machines of a cluster: their role, and their number if there may be several."""
    counts = {"worker": row.workers, "shard": row.shards}
    return ["server", "client", *(f"{role}{i}" for role, count in counts.items() for i in range(count))]


class MachineCluster:
    """Cluster with a machine for the server, for the script, and for each worker and each shard.

    Each machine runs one command; workers and shards are slots of ``nfdt worker``.

    Args:
        rig: Machines with the names of :func:`machine_names`.
        row: Numbers and options.
        script: File of the script.
        folder: Folder for logs and state, which all machines share.
        server_options: More options of ``nfdt server``.

    Attributes:
        state_dir: State directory of the server.
        names: Names of the machines.
    """

    def __init__(
        self, rig: Rig, row: ClusterRow, script: Path, folder: Path, server_options: Sequence[str] = ()
    ) -> None:
        self._rig, self._folder, self._server_options = rig, folder, server_options
        self.state_dir, self.names = folder / "state", machine_names(row)
        self._commands = {name: self._command(name, row, script) for name in self.names}
        self._running: dict[str, MachineProcess] = {}

    def _command(self, name: str, row: ClusterRow, script: Path) -> list[str]:
        server = self._rig["server"]
        if name == "server":
            self._credentials = Credentials(self._folder, server)
            place = ["--listen", f"{server.address}:{PORT}", "--state-dir", str(self.state_dir)]
            return [*NFDT, "server", *place, *self._credentials.of_server, "--allow-code", *self._server_options]
        connection = ["--server", f"{server.address}:{PORT}", *self._credentials.of_client]
        if name == "client":
            counts = ["--workers", str(row.workers), "--shards", str(row.shards), "--job", JOB, "--log-level", "info"]
            options = [part for option, value in row.options.items() for part in ("--set", f"{option}={value}")]
            return [*NFDT, "run", *connection, *counts, *options, str(script)]
        return [*NFDT, "worker", *connection, *SLOTS[_role(name)], "--log-dir", str(self._folder / "logs" / name)]

    def start(self) -> None:
        """Start all commands; that of the script runs as soon as the server listens.

        Raises:
            NfdtError: The server does not start.
        """
        self.start_command("server")
        deadline = time.monotonic() + START_S
        while not self.listens:
            if self.exit_code("server") is not None or time.monotonic() > deadline:
                raise NfdtError(f"The server did not start within {START_S:.0f} s:\n{self.tail('server')}")
            time.sleep(POLL_S)
        for name in reversed(self.names[1:]):
            self.start_command(name)

    def start_command(self, name: str) -> None:
        """Start the command of a machine, or another one in its place."""
        self._running[name] = self._rig[name].popen(self._commands[name], env=environment(), cwd=self._folder)

    @property
    def listens(self) -> bool:
        """Whether the server has announced that it listens since it was started last."""
        return "listening on " in self._running["server"].output()

    def machine(self, name: str) -> Machine:
        """Return a machine."""
        return self._rig[name]

    def commands(self, role: TargetRole) -> dict[str, ClusterProcess]:
        """Return the live commands of the machines of a role, by machine."""
        names = [name for name in self.names if _role(name) == role]
        found = {name: self._live(name) for name in names}
        return {name: ClusterProcess(role, names.index(name), one) for name, one in found.items() if one is not None}

    def processes(self, role: TargetRole) -> list[ClusterProcess]:
        """Return the live processes of a role, wherever they are; workers and shards count in the order of machines."""
        if role in ("server", "client"):
            return list(self.commands(role).values())
        parents = [parent for name in self.names if (parent := self._live(name)) is not None]
        slots = [slot.process for parent in parents for slot in find_slots(parent) if slot.role == role]
        return [ClusterProcess(role, index, slot) for index, slot in enumerate(slots)]

    def _live(self, name: str) -> psutil.Process | None:
        started = self._running.get(name)
        if started is None or started.poll() is not None:
            return None
        try:
            process = psutil.Process(started.pid)
        except psutil.Error:
            return None
        return process if is_alive(process) else None

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of a machine's command; None while it runs."""
        return self._running[name].poll()

    def tail(self, name: str) -> str:
        """Return the last lines of the log of a machine's command."""
        return "\n".join(self._running[name].error_output().splitlines()[-TAIL:])

    def stop(self) -> None:
        """End all commands in order, over links without faults; kill those that are left after a deadline."""
        for machine in self._rig:
            machine.repair()
            machine.mend()
            machine.set_rate(None)
            machine.resume()
        for name in reversed(self.names):
            if (command := self._running.get(name)) is not None:
                command.send_signal(signal.SIGTERM)
                try:
                    command.wait(END_S)
                except subprocess.TimeoutExpired:
                    command.kill()
                    command.wait()

    def leftovers(self) -> list[str]:
        """Return what is left on the machines; wait a moment for what is about to end."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = []
            for machine in self._rig:
                left = {
                    "process": map(describe_process, machine.processes()),
                    "file": _entries(machine, machine.tmp),
                    "segment": _entries(machine, Path("/dev/shm")),
                }
                found += [f"{kind} {machine.name}: {one}" for kind, names in left.items() for one in names]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)


def _role(name: str) -> str:
    return name.rstrip("0123456789")


def _entries(machine: Machine, folder: Path) -> list[str]:
    inside = machine.from_outside(folder)
    return sorted(entry.name for entry in inside.iterdir() if not entry.name.startswith(FOREIGN))
