"""Cluster of a trial: a server with its shards, and a relay each for its workers and for its script."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from nfdt.chaos.processes import (
    MARK,
    ClusterProcess,
    find_leftovers,
    find_slots,
    marked,
    send_signal,
    shared_memory_segments,
)
from nfdt.chaos.relay import Relay
from nfdt.chaos.schedule import ClusterRow, TargetRole
from nfdt.core.errors import NfdtError
from nfdt.core.host.private_files import private
from nfdt.core.jobs.rights import TokenRole

NFDT = (sys.executable, "-P", "-m", "nfdt.cli")
START_S = 180.0
END_S = 60.0
POLL_S = 0.1
JOB = "chaos"  # name under which a script that is run again finds its job
ROLES_OF_TOKENS: dict[TargetRole, TokenRole] = {"worker": "work", "client": "train"}
TAIL = 30  # lines of a log in an error


class ChaosCluster:
    """Processes of one trial on this machine, started as a user starts them.

    Args:
        row: Numbers and options.
        script: Command line of the script after the options of ``nfdt run``.
        folder: Folder for logs, state and temporary files.
        holders: Further lines of the server's token file, besides those of the workers' and of the script's token.

    Attributes:
        address: Address of the server, once it has started.
        ca_file: Certificate of the authority of the server's; None without TLS.
        state_dir: State directory of the server.
        relays: Relays by the role whose traffic passes them.
    """

    def __init__(self, row: ClusterRow, script: Sequence[str], folder: Path, holders: Sequence[str] = ()) -> None:
        self._row, self._script, self._folder, self._holders = row, list(script), folder, holders
        self.state_dir, self._temporary = folder / "state", folder / "tmp"
        # In the environment of all processes, so that those that are left are found whatever their parent is by then.
        self._mark = secrets.token_hex(8)
        self._segments_before = shared_memory_segments()
        self.relays: dict[TargetRole, Relay] = {}
        self.address = "127.0.0.1:0"
        self.ca_file = str(folder / "certs" / "ca.pem") if row.tls else None
        self._server_starts = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("NFDT_")}
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
        self._environment = {**quiet, **inherited, "TMPDIR": str(self._temporary), MARK: self._mark}

    def start(self) -> None:
        """Start all processes; the script runs as soon as the server listens.

        Raises:
            NfdtError: The server does not start.
        """
        self._temporary.mkdir(parents=True, mode=0o700)
        tokens = {role: secrets.token_hex(32) for role in ROLES_OF_TOKENS}
        lines = [f"{JOB} {ROLES_OF_TOKENS[role]} {token}" for role, token in tokens.items()]
        for role, text in {**tokens, "server": "\n".join((*lines, *self._holders))}.items():
            with open(self._token_file(role), "w", opener=private) as file:
                file.write(text)
        if self._row.tls:
            self._make_certificates()
        self.start_server()
        self.address = self._listening()
        for role in ("worker", "client"):
            self.relays[role] = Relay(self.address, self._environment)
        logs = ["--log-dir", str(self._folder / "logs"), "--name", "chaos"]
        self._start("workers", ["worker", *self._connection("worker"), "--slots", str(self._row.workers), *logs])
        self.start_script()

    def start_server(self) -> None:
        """Start the server, or another one at the same address with the same token and state."""
        tls = self._pem({"--tls-cert": "server.pem", "--tls-key": "server.key"})
        place = ["--listen", self.address, "--state-dir", str(self.state_dir)]
        place += ["--token-file", self._token_file("server")]
        self._server_starts += 1
        self._start("server", ["server", *place, "--allow-code", *tls])

    def start_script(self) -> None:
        """Run the script; again, it goes on with its job."""
        row = self._row
        counts = ["--workers", str(row.workers), "--shards", str(row.shards), "--job", JOB, "--log-level", "info"]
        options = [part for name, value in row.options.items() for part in ("--set", f"{name}={value}")]
        self._start("client", ["run", *self._connection("client"), *counts, *options, *self._script])

    @property
    def listens(self) -> bool:
        """Whether the server has announced that it listens since it was started last."""
        # Each start of the server appends its announcement to the same log.
        return len(self._announced()) == self._server_starts

    def _announced(self) -> list[str]:
        """Return the addresses at which the server has listened, one for each of its starts."""
        return re.findall(r"^listening on (\S+:\d+)$", self._log("server").read_text(errors="replace"), re.MULTILINE)

    def processes(self, role: TargetRole) -> list[ClusterProcess]:
        """Return the live processes of a role, by index."""
        if role in ("server", "client"):
            process = self._live(role)
            return [] if process is None else [ClusterProcess(role, 0, process)]
        parent = self._live("workers" if role == "worker" else "server")
        return [] if parent is None else [one for one in find_slots(parent) if one.role == role]

    @property
    def names(self) -> list[str]:
        """Names of the processes that have an exit code and a log."""
        return list(self._processes)

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of ``server``, ``workers`` or ``client``; None while it runs."""
        return self._processes[name].poll()

    def tail(self, name: str) -> str:
        """Return the last lines of a log."""
        with contextlib.suppress(OSError):
            return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-TAIL:])
        return ""

    def stop(self) -> None:
        """End all processes that were started here, in order; kill what is left after a deadline."""
        for process in list(marked(self._mark)):
            send_signal(process, signal.SIGCONT)
        for name in ("client", "workers", "server"):
            if name in self._processes:
                _end(self._processes[name])
        for relay in self.relays.values():
            relay.stop()

    def leftovers(self) -> list[str]:
        """Return what is left after :meth:`stop`, in words."""
        addresses = [self.address, *(relay.address for relay in self.relays.values())]
        return find_leftovers(self._mark, self._temporary, addresses, self._segments_before)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _token_file(self, role: str) -> str:
        return str(self._folder / f"{role}.token")

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        with open(self._log(name), "a", opener=private) as log:
            self._processes[name] = subprocess.Popen(
                [*NFDT, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the trial, which ends its processes in order
            )

    def _listening(self) -> str:
        """Wait until the server listens and return its address."""
        deadline = time.monotonic() + START_S
        while self.exit_code("server") is None and time.monotonic() < deadline:
            if found := self._announced():
                return found[-1]
            time.sleep(POLL_S)
        raise NfdtError(f"The server did not start within {START_S:.0f} s. The end of its log:\n{self.tail('server')}")

    def _live(self, name: str) -> psutil.Process | None:
        started = self._processes.get(name)
        if started is None or started.poll() is not None:
            return None
        with contextlib.suppress(psutil.Error):
            return psutil.Process(started.pid)
        return None

    def _connection(self, role: TargetRole) -> list[str]:
        place = ["--server", self.relays[role].address, "--token-file", self._token_file(role)]
        return [*place, *self._pem({"--ca-file": "ca.pem"})]

    def _pem(self, options: Mapping[str, str]) -> list[str]:
        """Return options with the files of certificates; none without TLS."""
        if not self._row.tls:
            return []
        return [part for option, name in options.items() for part in (option, str(self._folder / "certs" / name))]

    def _make_certificates(self) -> None:
        command = [*NFDT, "certs", "--host", "127.0.0.1", "--dir", str(self._folder / "certs")]
        subprocess.run(command, env=self._environment, check=True, capture_output=True, timeout=START_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it after a deadline."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
