"""Slot processes on this machine: started, supervised, restarted, and ended with their parent."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nfdt.core.host.child_process import ForkedProcess
from nfdt.core.host.code_user import CodeHomes
from nfdt.core.host.keras_backend import TENSORFLOW, VARIABLE
from nfdt.core.host.private_files import ensure_folder, private
from nfdt.core.jobs.runner import Role
from nfdt.launch.fork_client import ForkServerClient
from nfdt.launch.slot_process import (
    SLOT,
    SlotEnd,
    SlotOptions,
    keep_log,
    shared_environment,
    slot_arguments,
    slot_environment,
)

_log = logging.getLogger(__name__)

TERMINATE_S = 5.0
POLL_S = 0.2
CRASHES = 3  # number in a row, each before the slot was registered, after which no slot is started again
CRASH_S = 10.0  # an earlier end of a registered slot delays the next start
MOST_ENDS = 1000  # number of ends that are kept
RESTART_S = 0.5  # pause after a crash before the next start; doubles with each further crash
DOUBLINGS = 4
FAILED_STARTS = 3  # number in a row that counts as a failure; starts are still tried again

Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass
class _Slot:
    name: str
    role: Role
    index: int
    process: Process
    started_at: float


class LocalLauncher:
    """Launcher that keeps the wanted number of slot processes alive.

    Slots end with this process in any case, see :mod:`nfdt.core.host.child_process`: one thread starts all of them and
    holds the pipes of their standard input. If they can be forked, the fork server starts them.

    Args:
        options: Options for starting slots.
        ended: Called with the name of each slot that has ended, on a thread that must not block.
        fork_server: Fork server that the caller has; None: one is started for the first slot.

    Attributes:
        given_up: Event that is set when slots end before they are registered, again and again; then no more are
            started.
    """

    def __init__(
        self,
        options: SlotOptions,
        ended: Callable[[str], None] = lambda name: None,
        fork_server: ForkServerClient | None = None,
    ) -> None:
        self._options, self._ended = options, ended
        self._changed = threading.Condition()
        self._wanted: dict[Role, int] = {"worker": 0, "shard": 0}
        self._slots: list[_Slot] = []
        self._ends: dict[str, SlotEnd] = {}
        self._crashes = 0
        self._unregistered = 0  # number of those crashes, in a row, before the slot was registered
        self._crashed_at = 0.0
        self._failed_starts = 0  # number in a row
        self._failed_start_at = 0.0
        self._start_error = ""
        self._fork_server = fork_server
        self._forks_slots = sys.platform.startswith("linux") and options.command == SLOT and not options.gpus
        self.given_up = threading.Event()
        self._draining = self._stopping = False
        ensure_folder(options.logs, "Logs of slots")
        self._homes = CodeHomes() if options.code_user else None
        self._thread = threading.Thread(target=self._supervise, name="launcher", daemon=True)
        self._thread.start()

    def ensure(self, role: Role, count: int, backend: str = "") -> None:
        """Keep at least ``count`` slots of this role alive from now on; they are started in the background.

        ``backend``: that of Keras in the workers that are started from now on; "" for no change.
        """
        with self._changed:
            if backend:
                self._options = replace(self._options, backend=backend)
            if count > self._wanted[role]:
                self._wanted[role] = count
                self._changed.notify_all()

    @property
    def pids(self) -> list[int]:
        """Identifiers of the live slot processes."""
        with self._changed:
            return [s.process.pid for s in self._slots if s.process.poll() is None and s.process.pid is not None]

    @property
    def failure(self) -> str | None:
        """Reason why no slots can be started; None while they can."""
        if self.given_up.is_set():
            return (
                f"{CRASHES} times in a row slot processes ended before they were registered, so no more are started "
                f"here. The last: {next(reversed(self._ends.values()))}."
            )
        if self._failed_starts < FAILED_STARTS:
            return None
        return f"{self._start_error}. It is tried again every {_pause_s(DOUBLINGS + 1):.0f} s"

    def end_of(self, name: str, timeout_s: float) -> SlotEnd | None:
        """Return the end of a slot, after waiting for it; None for live slots and those of other launchers."""
        with self._changed:
            self._changed.wait_for(lambda: not any(slot.name == name for slot in self._slots), timeout_s)
            return self._ends.get(name)

    def drain(self) -> None:
        """Request all slots to end in order and start no more; return when they have ended, or the grace is over."""
        with self._changed:
            self._draining, self._wanted = True, {"worker": 0, "shard": 0}
            for slot in self._slots:
                _request_end(slot.process)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._slots, self._options.grace_s)

    def stop(self) -> None:
        """End all slots: close their standard input and terminate them, kill what is left after a deadline."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _supervise(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    break
                self._reap()
                missing = [] if self.given_up.is_set() else self._missing()
                if not missing or self._pauses():
                    # Ends are polled: exit codes of processes, and reports of the fork server, wake no thread.
                    self._changed.wait(POLL_S if self._slots or missing else None)
                    continue
            # Without the lock: to start a process takes long, and other threads ask for pids and failures.
            for role, index in missing:
                if not self._start(role, index):
                    break
        with self._changed:
            slots, self._slots = self._slots, []
            self._changed.notify_all()
        _end([slot.process for slot in slots])
        for slot in slots:
            self._ended(slot.name)
        if self._fork_server is not None:
            self._fork_server.stop()
        if self._homes is not None:
            self._homes.close()

    def _reap(self) -> None:
        for slot in [s for s in self._slots if s.process.poll() is not None]:
            self._slots.remove(slot)
            _close_stdin(slot.process)
            if self._homes is not None:
                self._homes.remove(slot.name)
            end = self._record_end(slot)
            self._ended(slot.name)
            self._count_crash(slot.started_at, end)
            self._changed.notify_all()

    def _record_end(self, slot: _Slot) -> SlotEnd:
        log, code = self._options.logs / f"{slot.name}.log", int(slot.process.returncode or 0)
        if slot.process.pid is None and self._fork_server is not None:  # it was never forked
            log = self._fork_server.log
        if code and self._options.kept_logs is not None:
            log = keep_log(log, self._options.kept_logs)
        end = self._ends[slot.name] = SlotEnd.read(code, log)
        if len(self._ends) > MOST_ENDS:
            del self._ends[next(iter(self._ends))]
        _log.log(logging.WARNING if code else logging.INFO, "%s slot %s: %s", slot.role, slot.name, end)
        return end

    def _count_crash(self, started_at: float, end: SlotEnd) -> None:
        """Count consecutive crashes; processes that end together, for instance with their fork server, count as one.

        Crashes of registered slots have other causes, such as a job that takes too much memory.
        """
        now = time.monotonic()
        if end.registered:
            self._unregistered = 0
        if end.returncode == 0 or (end.registered and now - started_at >= CRASH_S):
            self._crashes = 0
        elif started_at > self._crashed_at:
            self._crashes += 1
            self._unregistered += not end.registered
            self._crashed_at = now
        if self._unregistered >= CRASHES and not self.given_up.is_set():
            self.given_up.set()
            _log.error("%s", self.failure)

    def _pauses(self) -> bool:
        """Whether the pause after a crash or a failed start is not over yet."""
        now = time.monotonic()
        start_at = self._failed_start_at + _pause_s(self._failed_starts)
        return now < max(start_at, self._crashed_at + _pause_s(self._crashes))

    def _missing(self) -> list[tuple[Role, int]]:
        taken = {(slot.role, slot.index) for slot in self._slots}
        wanted = [(role, index) for role, count in self._wanted.items() for index in range(count)]
        return [each for each in wanted if each not in taken]

    def _start(self, role: Role, index: int) -> bool:
        """Start a slot; return False if that failed and must be retried."""
        name = f"{self._options.prefix}{role}-{index}-{secrets.token_hex(3)}"
        try:
            process = self._new_process(role, index, name)
        except Exception as error:  # the other slots depend on this thread
            self._start_error = f"{role} slot {index} cannot be started: {type(error).__name__}: {error}"
            self._failed_starts += 1
            self._failed_start_at = time.monotonic()
            _log.error("%s", self._start_error)
            return False
        self._failed_starts = 0
        with self._changed:
            self._slots.append(_Slot(name, role, index, process, time.monotonic()))
            if self._draining:
                _request_end(process)
        return True

    def _new_process(self, role: Role, index: int, name: str) -> Process:
        arguments = slot_arguments(self._options, role, name)
        if self._homes is not None:
            arguments += ["--code-user", self._options.code_user, "--code-home", str(self._homes.of(name))]
        environment = slot_environment(self._options, role, index, os.environ)
        with open(self._options.logs / f"{name}.log", "ab", opener=private) as log:
            forked = None
            if environment[VARIABLE] == TENSORFLOW:  # the fork server has loaded it
                forked = self._fork(arguments, f"nfdt {role} {index}", environment, log.fileno())
            return forked or subprocess.Popen(
                [*self._options.command, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _fork(self, arguments: list[str], name: str, environment: dict[str, str], log: int) -> ForkedProcess | None:
        """Fork a slot, after starting the fork server if necessary; return None if slots cannot be forked."""
        lost = self._fork_server
        if lost is not None and lost.returncode is not None:
            _log.warning("the fork server of slots ended with %s; see %s", lost.returncode, lost.log)
            # Another one would end likewise, unless this one has ever been ready, or was another process's.
            self._forks_slots = lost.ready or lost.pid is None
            lost.stop()
            self._fork_server = None
        if not self._forks_slots:
            return None
        try:
            if self._fork_server is None:
                shared = shared_environment(self._options, os.environ)
                self._fork_server = ForkServerClient.start(shared, self._options.logs / "fork-server.log")
            return self._fork_server.fork(arguments, name, environment, log)
        except OSError as error:
            _log.warning("%s is started, not forked: %s", name, error)
            return None


def _pause_s(failures: int) -> float:
    return RESTART_S * 2 ** min(failures - 1, DOUBLINGS) if failures else 0.0


def _request_end(process: Process) -> None:
    """Request a slot to end in order; see :class:`nfdt.worker.planned_end.PlannedEnd`."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.write(b"\n")
            process.stdin.flush()


def _close_stdin(process: Process) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        _close_stdin(process)
        process.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("slot %d did not end in %.0f s: killed", process.pid, TERMINATE_S)
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
