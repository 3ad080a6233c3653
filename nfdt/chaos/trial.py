"""A trial: a script trains on a cluster while the faults of a schedule are injected."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nfdt.chaos.accounting import RecordedJob, RecordedJobs, failure, first_progress, trained_steps
from nfdt.chaos.cluster import ChaosCluster
from nfdt.chaos.processes import ClusterProcess, send_signal
from nfdt.chaos.relay import Rule
from nfdt.chaos.schedule import RESTARTED, PlannedFault, Schedule, plan_faults
from nfdt.core.errors import NfdtError

POLL_S = 0.1
PATIENCE_S = 300.0
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


@dataclass
class TrialRecord:
    """Record of a trial.

    Attributes:
        injections: Faults that were injected.
        missed: Faults whose time did not come, or whose target was not there.
        jobs: Jobs of the script, with their events.
        problems: Reasons why the trial did not end well.
        leftovers: Remains after its end, in words.
        began_at: Unix time of the first trained step.
        server_bytes: Resident memory of each process of the server, at each fault and at the end.
        server_files: Number of its open descriptors at the same times.
    """

    injections: list[Injection] = field(default_factory=list)
    missed: list[PlannedFault] = field(default_factory=list)
    jobs: list[RecordedJob] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    began_at: float | None = None
    server_bytes: dict[psutil.Process, list[int]] = field(default_factory=dict)
    server_files: dict[psutil.Process, list[int]] = field(default_factory=dict)


class Trial:
    """One run of a script under faults.

    Args:
        cluster: The cluster, or another one with the same methods.
        injector: Injector of its faults, or another one with the same methods.
        faults: The faults.
        patience_s: Number of seconds without any event of a job after which the trial ends.
        stopped: Ends the trial early when it is set.
        log: Called with one line of text per fault.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        injector: Injector,
        faults: Sequence[PlannedFault],
        *,
        patience_s: float = PATIENCE_S,
        stopped: threading.Event | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._cluster, self._injector, self._waiting = cluster, injector, list(faults)
        self._recorded = RecordedJobs(cluster.state_dir)
        self._patience_s, self._log = patience_s, log
        self._stopped = stopped or threading.Event()
        self._record = TrialRecord()

    def run(self) -> TrialRecord:
        """Run until the script ends or makes no progress; end all processes and return the record."""
        record = self._record
        try:
            self._cluster.start()
            self._watch()
            self._measure()
        except NfdtError as error:
            record.problems.append(str(error))
        finally:
            self._cluster.stop()
        self._recorded.read()
        record.jobs, record.missed, record.injections = self._recorded.jobs, self._waiting, self._injector.injections
        if (reason := failure(record.jobs)) is not None:
            record.problems.append(reason)
        record.leftovers = self._cluster.leftovers()
        return record

    def _watch(self) -> None:
        """Inject faults until the script has ended or nothing goes on."""
        last_news = time.monotonic()
        while not self._stopped.wait(POLL_S):
            if self._recorded.read():
                last_news = time.monotonic()
            if (problem := self._ended()) is not None:
                self._record.problems += [problem] if problem else []
                return
            if time.monotonic() - last_news > self._patience_s:
                self._record.problems.append(f"nothing went on for {self._patience_s:g} s")
                return
            self._injector.poll()
            self._inject_due()
        self._record.problems.append("it was stopped")

    def _ended(self) -> str | None:
        """Return why a process has ended by itself, "" if the script has ended in order, None if all processes run."""
        for name in self._cluster.names:
            if (code := self._cluster.exit_code(name)) is None or self._injector.expects_end(name):
                continue
            if name == "client" and code == 0:
                return ""
            return f"{name} ended with exit code {code}; the end of its log:\n{self._cluster.tail(name)}"
        return None

    def _inject_due(self) -> None:
        jobs = self._recorded.jobs
        began_at = self._record.began_at = self._record.began_at or first_progress(jobs)
        if began_at is None:
            return
        elapsed_s, steps = time.time() - began_at, trained_steps(jobs)
        for fault in [one for one in self._waiting if one.is_due(elapsed_s, steps)]:
            self._measure()
            if (injection := self._injector.inject(fault)) is not None:
                self._waiting.remove(fault)
                seconds = f" for {fault.row.seconds:g} s" if fault.row.seconds is not None else ""
                self._log(f"{injection.at - began_at:7.1f} s  {fault.row.kind} {injection.target}{seconds}")

    def _measure(self) -> None:
        """Record the resident memory and the open descriptors of a server that has started."""
        for server in self._cluster.processes("server") if self._cluster.listens else ():
            with contextlib.suppress(psutil.Error):
                self._record.server_bytes.setdefault(server.process, []).append(server.process.memory_info().rss)
                self._record.server_files.setdefault(server.process, []).append(server.process.num_fds())


def local_trial(schedule: Schedule, script: Sequence[str], folder: Path, **options: Any) -> Trial:
    """Return the trial of a schedule on a cluster of this machine.

    Args:
        schedule: The schedule.
        script: Command line of the script after the options of ``nfdt run``.
        folder: Folder for logs, state and temporary files; it must not exist.
        options: Those of :class:`Trial`.
    """
    cluster = ChaosCluster(schedule.cluster, script, folder)
    return Trial(cluster, Injector(cluster), plan_faults(schedule), **options)
