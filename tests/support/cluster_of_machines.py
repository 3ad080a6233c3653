"""Job server, workers and shards on the machines of a rig, with TLS on every connection between them."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nfdt.core.wire.certificates import CertificateAuthority
from tests.support.machines import Machine, MachineProcess
from tests.support.scripts import DEADLINE_S, NFDT, environment

POLL_S = 0.1


class Credentials:
    """Token and certificates of a server on a machine, as files.

    Args:
        folder: Folder that all machines share.
        machine: Machine of the server.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.token, self.authority = folder / "token", folder / "ca.pem"
        self._pair = folder / "server.pem", folder / "server.key"
        authority = CertificateAuthority("test cluster")
        issued = authority.issue([machine.address, "127.0.0.1"])
        self.authority.write_bytes(authority.cert)
        for path, content in zip(self._pair, (issued.cert, issued.key), strict=True):
            path.write_bytes(content)
        self.token.write_text(secrets.token_hex(16))
        for secret in (self.token, self._pair[1]):
            secret.chmod(0o600)

    @property
    def of_server(self) -> list[str]:
        """Options of the server."""
        cert, key = map(str, self._pair)
        return ["--token-file", str(self.token), "--tls-cert", cert, "--tls-key", key]

    @property
    def of_client(self) -> list[str]:
        """Options of all commands that connect to it."""
        return ["--ca-file", str(self.authority), "--token-file", str(self.token)]


class MachinesCluster:
    """Context manager of an ``nfdt server`` on one machine, and of the slots that other machines offer.

    Args:
        folder: Folder that all machines share, for certificates, the token, scripts and the server's state.
        server: Machine of the server; scripts run there as well by default.
        options: More options of the server.
    """

    def __init__(self, folder: Path, server: Machine, *options: str) -> None:
        self._folder, self.machine = folder, server
        self.state_dir = folder / "state"
        self._credentials = Credentials(folder, server)
        self.address = ""
        place = ["--listen", f"{server.address}:0", "--state-dir", str(self.state_dir)]
        self._command = [*NFDT, "server", *place, *self._credentials.of_server, "--allow-code", *options]
        self._started: list[MachineProcess] = []

    def __enter__(self) -> MachinesCluster:
        server = self._start(self.machine, self._command)
        self.address = self.await_text(server, server.output, r"listening on (\S+)")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, machine: Machine, command: Sequence[str], **env: str) -> MachineProcess:
        process = machine.popen(command, env=environment(**env), cwd=self._folder)
        self._started.append(process)
        return process

    @staticmethod
    def await_text(process: MachineProcess, text: Callable[[], str], pattern: str) -> str:
        """Return the first group of a pattern once a text that a running process writes has it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, text())):
            assert process.poll() is None, f"ended with {process.returncode}: {process.error_output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} in: {process.error_output()[-4000:]}"
            time.sleep(POLL_S)
        return found.group(1)

    def offer(
        self, machine: Machine, slots: int = 0, shards: int = 0, options: Sequence[str] = (), **env: str
    ) -> MachineProcess:
        """Start ``nfdt worker`` on a machine, with more variables, and wait until its slots are registered."""
        counts = ["--slots", str(slots), "--shards", str(shards)]
        worker = self._start(machine, [*NFDT, "worker", *self.connection, *counts, *options], **env)
        one = rf"slot {machine.name}-\w+-\d+-\w+ attends[^!]*"
        self.await_text(worker, self._started[0].error_output, f"({one * (slots + shards)})")
        return worker

    @property
    def connection(self) -> list[str]:
        """Options with which any command of the cluster reaches the server."""
        return ["--server", self.address, *self._credentials.of_client]

    def env(self, **extra: str) -> dict[str, str]:
        """Return the environment of a script that uses the server."""
        known = {"NFDT_SERVER": self.address, "NFDT_CA_FILE": str(self._credentials.authority)}
        return environment(**known, NFDT_TOKEN_FILE=str(self._credentials.token), **extra)

    def run_script(self, source: str, machine: Machine | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end on a machine, by default that of the server."""
        script = self._folder / f"script-{secrets.token_hex(4)}.py"
        script.write_text(textwrap.dedent(source))
        command = [NFDT[0], str(script)]
        where = machine or self.machine
        return where.run(command, env=self.env(**env), cwd=self._folder, timeout=DEADLINE_S, check=False)

    def start_script(self, source: str, machine: Machine | None = None, **env: str) -> MachineProcess:
        """Start a script on a machine, by default that of the server."""
        script = self._folder / f"script-{secrets.token_hex(4)}.py"
        script.write_text(textwrap.dedent(source))
        process = (machine or self.machine).popen([NFDT[0], str(script)], env=self.env(**env), cwd=self._folder)
        self._started.append(process)
        return process

    def run(self, *arguments: str, machine: Machine | None = None) -> subprocess.CompletedProcess[str]:
        """Run an ``nfdt`` command that takes connection options."""
        command = [*NFDT, *arguments, *self.connection]
        where = machine or self.machine
        return where.run(command, env=environment(), cwd=self._folder, timeout=DEADLINE_S, check=False)

    def jobs(self) -> list[dict]:
        """Return the server's jobs."""
        return json.loads(self.run("jobs", "list", "--format", "json").stdout)
