"""Users' scripts in forks of a process that has imported Keras, like slots, with a warm server for their clusters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nfdt.launch.fork_client import ForkServerClient
from tests.support.scripts import DEADLINE_S, NFDT, environment

PROGRAM = """
import os, runpy, socket, sys
from nfdt.core.host.startup import quick_imports
from nfdt.launch.fork_server import ForkServer

with quick_imports():
    import keras, sklearn.datasets, tensorflow
arguments = ForkServer(socket.socket(fileno=os.dup(0))).serve()
if arguments:
    errors, *sys.argv = arguments
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    script = sys.argv[0]
    sys.path[0] = os.path.dirname(script)
    os.chdir(sys.path[0])
    runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Finished:
    returncode: int
    stdout: str
    stderr: str


class ScriptForkServer:
    """Run scripts in forked processes, in which Keras is imported already.

    A cluster of a script is one of a warm server, if that has the script's backend. It also ends with :meth:`stop`.
    """

    def __init__(self, directory: Path, **variables: str) -> None:
        env, log = environment(**variables), directory / "script-fork-server.log"
        self._variables = variables
        self._fork_server = ForkServerClient.start(env, log, command=[sys.executable, "-c", PROGRAM])
        subprocess.run([*NFDT, "start"], env=env, check=True, timeout=DEADLINE_S)

    def run(self, script: Path, *arguments: str, timeout_s: float = DEADLINE_S, **variables: str) -> Finished:
        """Run ``python script arguments`` in the script's directory.

        Args:
            script: The script.
            *arguments: Its arguments.
            timeout_s: Time limit in seconds.
            **variables: Environment variables. ``NFDT_WARM="false"``: its clusters have processes of their own.
        """
        output, errors = script.with_suffix(".stdout"), script.with_suffix(".stderr")
        env = environment(**{"NFDT_WARM": "true", **self._variables, **variables})
        with output.open("w") as log:
            process = self._fork_server.fork([str(errors), str(script), *arguments], "script", env, log.fileno())
        with process.stdin:
            try:
                code = process.wait(timeout_s)
            finally:
                process.terminate()
        return Finished(code, output.read_text(), errors.read_text())

    def stop(self) -> None:
        """End the fork server with the scripts that still run, and the warm server."""
        self._fork_server.stop()
        subprocess.run([*NFDT, "stop"], env=environment(**self._variables), check=True, timeout=DEADLINE_S)
