"""Peers in separate processes: commands with a deadline, and clusters described by TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
END_S = 10.0
TAIL_LINES = 30


class PeerFailed(Exception):
    """A peer failed or did not end; contains the end of its output."""


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a peer: this package can be imported, and TensorFlow's log output is suppressed."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", **extra}


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]] = ({},),
    *,
    needed: int | None = None,
    limit_s: float = LIMIT_S,
) -> None:
    """Run commands concurrently and wait for their end; no process is left running.

    Args:
        commands: Arguments of each command.
        environments: Variables of each command, added to those of this process.
        needed: Number of commands, from the first on, that must end by themselves; the others are then terminated.
        limit_s: Time limit for the needed commands.

    Raises:
        PeerFailed: a needed command failed or exceeded the limit.
    """
    needed = len(commands) if needed is None else needed
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        logs = [Path(folder) / f"{number}.log" for number in range(len(commands))]
        running = []
        for command, extra, log in zip(commands, environments, logs, strict=True):
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment(extra), stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
            ending.callback(_end, process)
            running.append(process)
        for number, process in enumerate(running[:needed]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.returncode != 0:
                raise PeerFailed(_explain(commands[number], process.returncode, logs[number], limit_s))


def _explain(command: Sequence[str], code: int | None, log: Path, limit_s: float) -> str:
    how = f"did not end within {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return f"{' '.join(command)} {how}. The end of what it wrote:\n{tail}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.kill()
    process.wait()


def tensorflow_cluster(**roles: int) -> list[dict[str, str]]:
    """Return ``TF_CONFIG`` of each process of a cluster on loopback, role by role, on currently free ports.

    Args:
        **roles: Number of processes of each role: ``worker=2``, ``ps=1``, ``chief=1``.
    """
    with contextlib.ExitStack() as held:  # all at once, so that the ports differ
        ports = {
            role: [held.enter_context(_listen()).getsockname()[1] for _ in range(count)]
            for role, count in roles.items()
        }
    cluster = {role: [f"127.0.0.1:{port}" for port in own] for role, own in ports.items()}
    tasks = [{"type": role, "index": index} for role, own in ports.items() for index in range(len(own))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def _listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))
