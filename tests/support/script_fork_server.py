"""Users' scripts in forks of a process that has imported Keras, like slots."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from nfdt.launch.fork_client import ForkServerClient

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
    """Run scripts in forked processes, in which Keras is imported already."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        log = directory / "script-fork-server.log"
        self._fork_server = ForkServerClient.start(environment, log, command=[sys.executable, "-c", PROGRAM])

    def run(self, script: Path, *arguments: str, environment: dict[str, str], timeout_s: float) -> Finished:
        """Run ``python script arguments`` in the script's directory."""
        output, errors = script.with_suffix(".stdout"), script.with_suffix(".stderr")
        with output.open("w") as log:
            process = self._fork_server.fork(
                [str(errors), str(script), *arguments], "script", environment, log.fileno()
            )
        with process.stdin:
            try:
                code = process.wait(timeout_s)
            finally:
                process.terminate()
        return Finished(code, output.read_text(), errors.read_text())

    def stop(self) -> None:
        """End the fork server and the scripts that still run."""
        self._fork_server.stop()
