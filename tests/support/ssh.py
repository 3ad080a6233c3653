"""Logins without a password between the machines of a rig: sshd on each, and ``ssh`` on the PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.machines import Machine, Rig

DEADLINE_S = 30
POLL_S = 0.05
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
SERVER = """
ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {key}.pub
PidFile none
StrictModes no
UsePAM no
SetEnv {variables}
"""


def missing_programs() -> str:
    """Return which of ssh's programs this machine lacks; empty if it has all."""
    missing = [name for name in ("ssh", "sshd", "ssh-keygen") if shutil.which(name, path=PATH) is None]
    return f"missing packages: openssh-server ({' '.join(missing)})" if missing else ""


class Logins:
    """Logins between the machines of a rig.

    Args:
        rig: The machines.
        folder: Folder that all of them share.
        variables: Names of this process's variables that a login has as well.
    """

    def __init__(self, rig: Rig, folder: Path, variables: Sequence[str] = ("PATH", "PYTHONPATH")) -> None:
        self._folder, self._key = folder, folder / "ssh-key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._key], check=True)
        self._variables = {name: os.environ[name] for name in variables if name in os.environ}
        programs = folder / "programs"
        programs.mkdir()
        client = programs / "ssh"
        options = ["-i", str(self._key), "-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"]
        real = shlex.join([shutil.which("ssh") or "", *options])
        client.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        client.chmod(0o700)
        self.path = f"{programs}:{PATH}"
        for machine in rig:
            self.serve(machine)

    def serve(self, machine: Machine) -> None:
        """Start sshd on a machine; again after it has lost its power."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        settings = self._folder / f"sshd-{machine.name}.conf"
        variables = " ".join(f'"{name}={value}"' for name, value in self._variables.items())
        settings.write_text(SERVER.format(address=machine.address, key=self._key, variables=variables))
        server = machine.popen([shutil.which("sshd", path=PATH) or "", "-D", "-e", "-f", settings])
        deadline = time.monotonic() + DEADLINE_S
        while "Server listening" not in server.error_output():
            assert server.poll() is None, server.error_output()
            assert time.monotonic() < deadline, server.error_output()
            time.sleep(POLL_S)
