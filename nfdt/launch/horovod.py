"""Allreduce rings that a launcher on this machine starts, one job at a time uses, and the reasons for their ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfdt.core.errors import JobFailed
from nfdt.core.host.private_files import private, write_private
from nfdt.launch.horovod_command import HostInfo, RingShape, choose_launcher, ring_command, ring_environment
from nfdt.launch.horovod_log import RingMessages, RingStall, finish_timeline, lost_machine, timelines
from nfdt.launch.ring import Ring, RingMaker

_log = logging.getLogger(__name__)

TAIL_LINES = 30
QUIT_S = 4.0  # time for dismissed ranks to exit
TERMINATE_S = 5.0
RING_END_S = 8.0  # time for a ring that has lost a rank to end
NAME = "ring-"
ENDED = ""  # job of a ring that is about to end
_OWN_SESSIONS = {"OMPI_MCA_orte_local_tmpdir_base", "OMPI_MCA_orte_remote_tmpdir_base"}  # mpirun takes no other folder
_NOISE = re.compile(r"^\s*(-{10,}|)\s*$")


def host_info() -> HostInfo:
    """Return the properties of this machine for launchers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return HostInfo(shutil.which("mpirun"), cores, os.geteuid() == 0)


@dataclass(eq=False)
class LaunchedRing:
    """One launcher process with its ranks; a :class:`~nfdt.launch.ring.Ring`.

    Attributes:
        name: Name of the ring, in the hello of rank 0's slots.
        shape: Shape of the ring.
        command: Command line of the launcher.
        directory: Folder for the token, reports of failed ranks and session files of mpirun; removed when the ring has
            ended.
        process: The launcher.
        job_id: Job that it works for; None: it is free.
    """

    name: str
    shape: RingShape
    command: list[str]
    directory: Path
    process: subprocess.Popen[bytes]
    job_id: str | None = None
    awaited_slots = 0  # the launcher needs none
    _messages: RingMessages = field(init=False)

    def __post_init__(self) -> None:
        self._messages = RingMessages(self.log)

    @property
    def origin(self) -> str:
        """Command line of the launcher."""
        return shlex.join(self.command)

    def messages(self) -> tuple[list[RingStall], list[str]]:
        """Return Horovod's stall warnings and the ring's messages since the last call."""
        return self._messages.read()

    @property
    def failure(self) -> str | None:
        """Reason of the ring's end; None while it runs."""
        if (code := self.process.poll()) is None:
            return None
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = "\n".join([line for line in lines if not _NOISE.match(line)][-TAIL_LINES:])
        machine = lost_machine(lines)
        gone = f": {machine} has not answered for {self.shape.probes.lost_s} s" if machine else ""
        return (
            f"The ring of {self.shape.size} ranks ended with exit code {code}{gone}. It was started with: "
            f"{self.origin}\nThe end of its log:\n{tail or '(nothing)'}"
        )

    def why(self, timeout_s: float = RING_END_S) -> JobFailed | None:
        """Return the reason of the ring's end, after waiting for it; None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        failure = self.failure
        return None if failure is None else JobFailed(failure)

    def report(self) -> dict[str, Any] | None:
        """Report that the first failed rank left behind."""
        for path in sorted(self.directory.glob("failure-*.json"), key=lambda p: p.stat().st_mtime):
            with contextlib.suppress(ValueError, OSError):
                return dict(json.loads(path.read_text()))
        return None

    @property
    def log(self) -> Path:
        """File with standard output and error of the launcher and all ranks; remains when the ring has ended."""
        return self.directory.with_suffix(".log")

    def clean_up(self) -> None:
        """Remove the token and the reports of failed ranks after the ring's end.

        Ranks that a launcher of the user started wait for the server to remove the directory.
        """
        if self.shape.launcher == "world":
            (self.directory / "token").unlink(missing_ok=True)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)


class RingLauncher:
    """Launcher that starts and ends the rings of a server; any thread may call it.

    Args:
        directory: Folder in which each ring gets a directory, beside its log; made with mode 0700.
        server: ``host:port`` at which rank 0 registers.
        token: Token of the slots; rank 0 reads it from a file of mode 0600.
        keeps: Whether a ring whose job has ended waits for the next one (a server of one script) instead of ending.
        command: Command line of a rank; tests give another one.
    """

    def __init__(
        self,
        directory: Path,
        server: str,
        token: str,
        *,
        keeps: bool,
        command: Sequence[str] = (sys.executable, "-P", "-m", "hfdt.runtime.rank"),
        look: Callable[[], HostInfo] = host_info,
    ) -> None:
        self._directory, self._server, self._token, self._keeps = directory, server, token, keeps
        self._command, self._look = tuple(command), look
        self._lock = threading.Lock()
        self._rings: list[LaunchedRing] = []
        self._world_started = False
        for left in directory.glob(f"{NAME}*/"):  # left by a killed server: a state directory has one server at a time
            shutil.rmtree(left, ignore_errors=True)

    def prepare(self, shape: RingShape) -> None:
        """Start a ring in advance for the first job of this shape."""
        with self._lock:
            self._start(shape, None)

    def check(self, shape: RingShape) -> None:
        """Raise UsageError if this machine has no launcher for this shape."""
        choose_launcher(shape, self._look())

    def claim(self, job_id: str, shape: RingShape) -> LaunchedRing:
        """Claim a ring of this shape for a job: its own, a free one, or a new one that starts in the background."""
        with self._lock:
            alike = [ring for ring in self._rings if ring.shape == shape]
            own = [ring for ring in alike if ring.job_id == job_id]
            free = [ring for ring in alike if ring.job_id is None and ring.process.poll() is None]
            if found := [*own, *free]:
                found[0].job_id = job_id
                return found[0]
            if shape.launcher == "world" and self._world_started:
                raise JobFailed("The world that the launcher started has ended: mpirun starts one only. Run it again.")
            return self._start(shape, job_id)

    def release(self, job_id: str, *, usable: bool) -> None:
        """Release the rings of a job; ``usable``: their ranks can serve another one."""
        with self._lock:
            rings = [ring for ring in self._rings if ring.job_id == job_id]
            for ring in rings:
                ring.job_id = None
            ended = [ring for ring in rings if not (self._keeps and usable and ring.process.poll() is None)]
            self._rings = [ring for ring in self._rings if ring not in ended]
        _end(ended)

    def end(self, rings: Sequence[Ring]) -> None:
        """End these rings of a job in the background; their slots have been dismissed."""
        with self._lock:
            ended = [ring for ring in self._rings if ring in rings]
            for ring in ended:
                ring.job_id = ENDED

        def finish() -> None:
            try:
                _end_soon(ended)
            finally:
                with self._lock:
                    self._rings = [ring for ring in self._rings if ring not in ended]

        threading.Thread(target=finish, name="ending-rings", daemon=True).start()

    def stop(self) -> None:
        """End all rings, whose slots have been dismissed; rings without a job end by themselves."""
        with self._lock:
            rings, self._rings = self._rings, []
        _end_soon(rings)

    def _start(self, shape: RingShape, job_id: str | None) -> LaunchedRing:
        name = f"{NAME}{secrets.token_hex(4)}"
        directory = self._directory / name
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(mode=0o700)
        program = [*self._command, "--server", self._server, "--ring", str(directory)]
        if shape.members:
            program += ["--members", ",".join(map(str, shape.members)), "--neighbours", str(shape.neighbours)]
        variables, in_world = shape.variables, shape.launcher == "world"
        folder = None if _OWN_SESSIONS & os.environ.keys() else directory
        try:
            command = ring_command(shape, program, self._look(), folder=folder)
            write_private(directory / "token", self._token.encode())
            with open(directory.with_suffix(".log"), "wb", opener=private) as output:
                process = subprocess.Popen(
                    command,
                    env=ring_environment(os.environ, variables=variables, in_world=in_world),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        ring = LaunchedRing(name, shape, command, directory, process, job_id)
        _log.info("%s: %s", name, ring.origin)
        self._rings.append(ring)
        self._world_started |= in_world
        return ring


class LaunchedRings(RingMaker):
    """Rings of one job that a launcher starts, which also places their ranks."""

    def __init__(self, launcher: RingLauncher, job_id: str) -> None:
        self._launcher, self._job_id = launcher, job_id

    def claim(self, shape: RingShape) -> Ring:
        """Return the job's ring of this shape, a free one, or a new one; see :meth:`RingLauncher.claim`."""
        return self._launcher.claim(self._job_id, shape)

    def end(self, rings: Sequence[Ring]) -> None:
        """End these rings in the background; their slots have been dismissed."""
        self._launcher.end(rings)

    def release(self, *, usable: bool) -> None:
        """Release the rings of the job; ``usable``: their ranks can serve another one."""
        self._launcher.release(self._job_id, usable=usable)


def _end_soon(rings: Sequence[LaunchedRing]) -> None:
    """Give dismissed ranks some time to exit, then end them."""
    deadline = time.monotonic() + QUIT_S
    for ring in rings:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ring.process.wait(max(0.0, deadline - time.monotonic()))
    _end(rings)


def _end(rings: Sequence[LaunchedRing]) -> None:
    """Terminate launchers, which end their ranks; kill those that remain."""
    living = [ring for ring in rings if ring.process.poll() is None]
    for ring in living:
        ring.process.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for ring in living:
        try:
            ring.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ring.process.pid, signal.SIGKILL)
            ring.process.wait()
    for ring in rings:
        ring.clean_up()
    for named in {ring.shape.tuning.timeline for ring in rings}:
        for path in timelines(Path(named)) if named else ():
            finish_timeline(path)
