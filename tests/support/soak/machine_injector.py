"""Injection of faults into machines, their links and their processes, and the end of the faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from nfdt.chaos.processes import ClusterProcess, send_signal
from nfdt.chaos.schedule import PlannedFault
from nfdt.chaos.trial import Injection
from tests.support.machines import Machine
from tests.support.machines.link_emulator import LinkDamage
from tests.support.soak.machine_cluster import MachineCluster
from tests.support.soak.machine_schedule import MachineFault

PROCESS_KINDS = ("kill", "stall")  # they hit one process; the others hit a machine


@dataclass
class _Restart:
    """Start of the command of a machine, ``pause_s`` after its end."""

    pause_s: float
    prepare: Callable[[], object]
    due: float | None = None


@dataclass(frozen=True)
class _End:
    due: float
    undo: Callable[[], object]


class MachineInjector:
    """Injector of the faults of one trial; the caller polls it.

    A machine has one fault of its own at a time; another one that hits it waits.

    Args:
        cluster: The cluster.

    Attributes:
        injections: All faults so far.
    """

    def __init__(self, cluster: MachineCluster) -> None:
        self._cluster = cluster
        self._ends: dict[str, _End] = {}  # by machine, or by the number of a fault of a process
        self._restarts: dict[str, _Restart] = {}
        self.injections: list[Injection] = []

    def expects_end(self, name: str) -> bool:
        """Whether a fault has ended the command of a machine, and it has not been started again yet."""
        return name in self._restarts

    def inject(self, fault: PlannedFault) -> Injection | None:
        """Inject a fault; return None if there is no target for it now, so that it has to be tried again."""
        row, at = fault.row, time.time()
        if row.kind in PROCESS_KINDS:
            target = self._hit_process(fault)
        else:
            target = self._hit_machine(fault)
        if target is None:
            return None
        self.injections.append(Injection(fault, target, at))
        return self.injections[-1]

    def poll(self) -> None:
        """End the faults whose time is over; start the commands again that faults have ended."""
        now = time.monotonic()
        for key, end in list(self._ends.items()):
            if end.due <= now:
                self._ends.pop(key).undo()
        for name, restart in list(self._restarts.items()):
            if self._cluster.exit_code(name) is None:
                continue
            restart.due = restart.due or now + restart.pause_s
            if restart.due <= now:
                del self._restarts[name]
                restart.prepare()
                self._cluster.start_command(name)

    def _hit_process(self, fault: PlannedFault) -> ClusterProcess | None:
        row = fault.row
        found = [one for one in self._cluster.processes(row.role) if row.target in (None, one.index)]
        if not found:
            return None
        target = fault.choose(found)
        command = next((name for name, one in self._cluster.commands(row.role).items() if one == target), None)
        if command in self._restarts:
            return None
        if not send_signal(target.process, signal.SIGKILL if row.kind == "kill" else signal.SIGSTOP):
            return None
        if row.kind == "stall":
            self._later(str(fault.number), row.seconds, lambda: send_signal(target.process, signal.SIGCONT))
        elif command is not None:
            self._restarts[command] = _Restart(row.seconds, lambda: None)
        return target

    def _hit_machine(self, fault: PlannedFault) -> ClusterProcess | None:
        row = fault.row
        found = {
            name: target
            for name, target in self._cluster.commands(row.role).items()
            if row.target in (None, target.index) and name not in self._ends and name not in self._restarts
        }
        if not found:
            return None
        name, target = fault.choose(list(found.items()))
        machine = self._cluster.machine(name)
        if row.kind == "terminate":
            if not send_signal(target.process, signal.SIGTERM):
                return None
            self._restarts[name] = _Restart(row.seconds, lambda: None)
        elif row.kind == "power":
            machine.lose_power()
            self._restarts[name] = _Restart(row.seconds, machine.mend)
        elif row.kind == "pause":
            machine.pause()
            self._later(name, row.seconds, machine.resume)
        else:
            self._later(name, row.seconds, _damage(machine, row))
        return target

    def _later(self, key: str, seconds: float, undo: Callable[[], object]) -> None:
        self._ends[key] = _End(time.monotonic() + seconds, undo)


def _damage(machine: Machine, row: MachineFault) -> Callable[[], object]:
    """Damage the link of a machine; return how to repair it."""
    if row.kind == "cut":
        machine.cut()
        return machine.mend
    if row.mbit is not None:
        machine.set_rate(row.mbit)
        return lambda: machine.set_rate(None)
    part = row.percent / 100
    loss, corruption = (part, 0.0) if row.kind == "lose" else (0.0, part)
    machine.damage(LinkDamage(loss, corruption, row.delay_ms))
    return machine.repair
