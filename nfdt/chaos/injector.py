"""Injection of faults into a cluster, and the end of those that last for a time."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from nfdt.chaos.cluster import ChaosCluster
from nfdt.chaos.processes import ClusterProcess, send_signal
from nfdt.chaos.relay import Rule
from nfdt.chaos.schedule import RESTARTED, PlannedFault

_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stall": signal.SIGSTOP}


@dataclass
class Injection:
    """A fault that has been injected.

    Attributes:
        fault: The fault.
        target: The process.
        at: Unix time of the injection.
    """

    fault: PlannedFault
    target: ClusterProcess
    at: float


@dataclass
class _Restart:
    pause_s: float
    due: float | None = None  # once the process has ended


class Injector:
    """Injects the faults of one trial. The caller polls it to end faults and to restart processes.

    Args:
        cluster: The cluster.

    Attributes:
        injections: All faults so far.
    """

    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self._ends: list[tuple[float, Callable[[], object]]] = []  # when a fault ends, and what ends it
        self._restarts: dict[str, _Restart] = {}
        self.injections: list[Injection] = []

    def expects_end(self, role: str) -> bool:
        """Whether a fault has ended the process of a role, which has not been restarted yet."""
        return role in self._restarts

    def inject(self, fault: PlannedFault) -> Injection | None:
        """Inject a fault; return None if there is no process for it now, so that it has to be tried again."""
        row = fault.row
        candidates = [
            one for one in self._cluster.processes(row.role) if row.target == "random" or one.index == row.target
        ]
        if not candidates or self.expects_end(row.role):
            return None
        if row.kind == "fill_disk" and not self._cluster.listens:
            return None  # no server starts on a full disk
        target, at = fault.choose(candidates), time.time()
        if not self._act(fault, target):
            return None
        injection = Injection(fault, target, at)
        self.injections.append(injection)
        return injection

    def poll(self) -> None:
        """End the faults whose time is over, and restart the processes that faults have ended."""
        now = time.monotonic()
        over = [end for end in self._ends if end[0] <= now]
        self._ends = [end for end in self._ends if end[0] > now]
        for _, undo in over:
            undo()
        for role, restart in list(self._restarts.items()):
            if self._cluster.exit_code(role) is None:
                continue
            restart.due = restart.due or now + restart.pause_s
            if restart.due <= now:
                del self._restarts[role]
                self._cluster.start_server() if role == "server" else self._cluster.start_script()

    def _act(self, fault: PlannedFault, target: ClusterProcess) -> bool:
        row = fault.row
        if row.kind in _SIGNALS:
            if not send_signal(target.process, _SIGNALS[row.kind]):
                return False
            if row.kind == "stall":
                self._undo_after(row.seconds, lambda: send_signal(target.process, signal.SIGCONT))
            elif row.role in RESTARTED:
                self._restarts[row.role] = _Restart(row.seconds or 0.0)
        elif row.kind == "fill_disk":
            return self._fill_disk(target, row.seconds)
        else:
            self._damage(fault, target)
        return True

    def _undo_after(self, seconds: float, undo: Callable[[], object]) -> None:
        self._ends.append((time.monotonic() + seconds, undo))

    def _damage(self, fault: PlannedFault, target: ClusterProcess) -> None:
        """Damage the connections of a process to the server."""
        row, relay = fault.row, self._cluster.relays[fault.row.role]
        flip = fault.draw if row.kind == "corrupt" else None
        rule = Rule((target.process.pid,), row.kind == "cut", row.mbit, row.delay_ms or 0.0, flip)
        relay.set_rule(fault.number, rule)
        if row.seconds is not None:
            self._undo_after(row.seconds, lambda: relay.set_rule(fault.number, None))

    def _fill_disk(self, server: ClusterProcess, seconds: float) -> bool:
        """Make every write of the server to a file fail, as on a full disk."""
        limit = resource.RLIMIT_FSIZE
        try:
            soft, hard = resource.prlimit(server.process.pid, limit)
            resource.prlimit(server.process.pid, limit, (0, hard))
        except (OSError, ValueError):
            return False

        def restore() -> None:
            """Lift the limit, also of processes that were started meanwhile and have inherited it."""
            with contextlib.suppress(psutil.Error):
                for one in [server.process, *server.process.children(recursive=True)]:
                    with contextlib.suppress(OSError):
                        resource.prlimit(one.pid, limit, (soft, hard))

        self._undo_after(seconds, restore)
        return True
