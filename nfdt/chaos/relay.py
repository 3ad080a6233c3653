"""The injector's side of a relay; the other side is :mod:`nfdt.chaos.relay_process`."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from nfdt.chaos.relay_process import Rule
from nfdt.core.errors import NfdtError

ANSWER_S = 60.0
COMMAND = (sys.executable, "-P", "-m", "nfdt.chaos.relay_process")


class Relay:
    """Relay process between the processes of one role and the server.

    Args:
        target: ``HOST:PORT`` of the server.
        environment: Environment of the process.

    Attributes:
        address: ``HOST:PORT`` at which it listens.
    """

    def __init__(self, target: str, environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*COMMAND, target], env=dict(environment), stdin=pipe, stdout=pipe, text=True)
        self.address = f"127.0.0.1:{self._answer()}"

    def set_rule(self, number: int, rule: Rule | None) -> None:
        """Replace the rule of this number, or remove it; return when it holds.

        Raises:
            NfdtError: The process has ended, or does not answer.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer shows
            self._process.stdin.write(json.dumps({"number": number, "rule": rule and asdict(rule)}) + "\n")
            self._process.stdin.flush()
        self._answer()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> str:
        """Return the process's next line."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise NfdtError(f"The relay of process {self._process.pid} gave no answer within {ANSWER_S:.0f} s.")
        return line.strip()
