"""Machine of a rig, from the side of the process that owns it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from tests.support.machines.keeper import batch, set_rate
from tests.support.machines.link_emulator import LinkDamage
from tests.support.machines.members import DEADLINE_S, members, signal_all
from tests.support.machines.plan import ROOT, MachinePlan, RigError, RigPlan, entering, environment, namespace_of

EMULATE = "from tests.support.machines.link_emulator import main; main()"
NO_OFFLOADS = "from tests.support.machines.link_emulator import disable_offloads; disable_offloads('eth0')"


class MachineProcess(subprocess.Popen):
    """Process in a machine; its standard output and errors go to files."""

    out: Path
    err: Path

    def output(self) -> str:
        """Return what the process has printed."""
        return self.out.read_text(errors="replace")

    def error_output(self) -> str:
        """Return what the process has written to standard error."""
        return self.err.read_text(errors="replace")


class Machine:
    """One machine of a rig."""

    def __init__(self, rig: RigPlan, plan: MachinePlan, logs: Path) -> None:
        self.name = plan.name
        self.address = plan.address
        self.plan = plan
        self._rig = rig
        self._logs = logs
        self._namespace = namespace_of(plan.holder)
        self._started: list[MachineProcess] = []
        self._emulator: subprocess.Popen | None = None

    def __repr__(self) -> str:
        return f"Machine({self.name!r}, {self.address})"

    @property
    def home(self) -> Path:
        """Return the home folder, by its path inside the machine."""
        return self._rig.own / "home"

    @property
    def tmp(self) -> Path:
        """Return the folder for temporary files, by its path inside the machine."""
        return self._rig.own / "tmp"

    def from_outside(self, path: str | Path) -> Path:
        """Return the path by which this process sees a file of the machine's own folders."""
        return Path(f"/proc/{self.plan.holder}/root") / str(path).lstrip("/")

    def command(self, command: Sequence[str | Path], cwd: str | Path | None = None) -> list[str]:
        """Return the command that enters the machine and runs ``command`` there."""
        return entering(self._rig, self.plan, command, cwd or Path.cwd())

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return ``base``, or the variables of this process, with the machine's own folders."""
        return environment(self._rig, self.plan, os.environ if base is None else base)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 300,
        check: bool = True,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine and return its captured text.

        Raises:
            RigError: The command failed, and ``check`` is set.
        """
        stdin = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(
            self.command(command, cwd),
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=timeout,
            start_new_session=True,
            **stdin,
        )
        if check and done.returncode:
            words = " ".join(map(str, command))
            raise RigError(f"{self.name}: {words!r} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options,
    ) -> MachineProcess:
        """Start a command in the machine; without ``stdout`` and ``stderr``, they are files ``out`` and ``err``."""
        stem = f"{self.name}-{len(self._started)}"
        out, err = self._logs / f"{stem}.out", self._logs / f"{stem}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = MachineProcess(
                self.command(command, cwd),
                env=self.environment(env),
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, **options},
            )
        process.out, process.err = out, err
        self._started.append(process)
        self._await_entry(process)
        return process

    def _await_entry(self, process: MachineProcess) -> None:
        """Wait until a process is one of the machine's, so that :meth:`kill` and :meth:`pause` find it."""
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None and process.pid not in members([self._namespace]):
            if time.monotonic() > deadline:
                raise RigError(f"process {process.pid} did not enter {self.name} within {DEADLINE_S} s")
            time.sleep(0.001)

    def processes(self) -> list[int]:
        """Return the ids of all processes in the machine."""
        return members([self._namespace], [self.plan.holder])

    def pause(self) -> None:
        """Stop all processes of the machine."""
        signal_all([self._namespace], signal.SIGSTOP, [self.plan.holder])

    def resume(self) -> None:
        """Let all processes of the machine go on."""
        signal_all([self._namespace], signal.SIGCONT, [self.plan.holder])

    def kill(self) -> None:
        """Kill all processes of the machine; its address, files and link remain.

        The kernel closes their connections in order; see :meth:`lose_power`.
        """
        signal_all([self._namespace], signal.SIGKILL, [self.plan.holder])
        self.collect()

    def lose_power(self) -> None:
        """Kill all processes of the machine, and forget its connections without a message; :meth:`mend` its link then.

        Its address and files remain.
        """
        self.cut()
        self.pause()
        self.run(["ss", "--kill", "--tcp", "--all"])
        self.kill()

    def collect(self) -> None:
        """Await the processes that :meth:`popen` started and that have ended."""
        for process in self._started:
            process.poll()

    def cut(self) -> None:
        """Lose all packets from and to the machine; its own end of the link stays up."""
        batch("ip", self._rig.switch, [f"link set {self.plan.port} nomaster"])

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        batch("ip", self._rig.switch, [f"link set {self.plan.port} master br0"])

    def damage(self, damage: LinkDamage) -> None:
        """Lose, corrupt or delay packets from and to the machine, until :meth:`repair`."""
        port = self.plan.port
        near, far, peer = port, f"{port}a", f"{port}b"
        self.run([sys.executable, "-c", NO_OFFLOADS], cwd=ROOT)
        lines = [f"link set {near} nomaster", f"link add {far} type veth peer name {peer}"]
        batch("ip", self._rig.switch, [*lines, f"link set {far} up", f"link set {peer} master br0 up"])
        inside = ["nsenter", f"--target={self._rig.switch}", "--net", sys.executable, "-c", EMULATE]
        numbers = map(str, astuple(damage))
        pipe = subprocess.PIPE
        self._emulator = subprocess.Popen(
            [*inside, near, far, peer, *numbers], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=ROOT
        )
        if self._emulator.stdout.readline() != b"ready\n":
            raise RigError(f"{self.name}: its link cannot be damaged: {self._end_emulator()}")

    def repair(self) -> None:
        """Undo :meth:`damage`, if there is any."""
        if self._emulator is None:
            return
        self._end_emulator()
        lines = [f"link del {self.plan.port}a", f"link set {self.plan.port} master br0"]
        batch("ip", self._rig.switch, lines)

    def _end_emulator(self) -> str:
        """End the emulator of the link and return its errors."""
        emulator, self._emulator = self._emulator, None
        emulator.kill()
        return emulator.communicate()[1].decode().strip()

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of the link, in both directions."""
        set_rate(self._rig, self.plan, rate_mbit)
