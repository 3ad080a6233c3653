"""A Ray cluster of several nodes on this machine, in a process of its own.

Ray forks, and a fork beside threads that are in gRPC, as those of other tests are, may never come to its program.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STOP_S = 60


@dataclass
class RayNodes:
    """A head without CPUs and nodes with some.

    Attributes:
        process: Process that runs ``tests.support.ray_nodes``.
        address: Address of the head, ``HOST:PORT``.
    """

    process: subprocess.Popen[str]
    address: str

    def remove_node(self) -> None:
        """End the node that was added last."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line_of(self.process)


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that the program prints; fail with the rest of its output if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate(timeout=STOP_S)
    return line


@contextmanager
def ray_cluster(nodes: int, cpus: int) -> Iterator[RayNodes]:
    """Run a head without CPUs and ``nodes`` nodes with ``cpus`` each; nothing of it is left after the block."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray's sockets lie below it
    command = [sys.executable, "-m", "tests.support.ray_nodes", folder, str(nodes), str(cpus)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        try:
            yield RayNodes(process, line_of(process))
        finally:
            process.communicate(timeout=STOP_S)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
