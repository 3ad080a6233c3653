"""What this machine has: GPUs, and the address others reach it at."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

_WILDCARDS = ("0.0.0.0", "::")


def find_gpus(environment: Mapping[str, str], proc: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """The GPUs to share out among worker slots, as ``CUDA_VISIBLE_DEVICES`` names them; empty without any."""
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    return tuple(str(i) for i, _ in enumerate(proc.iterdir())) if proc.is_dir() else ()


def reachable_host(listen_host: str) -> str:
    """The host under which others reach a server that listens there: an address of ours for a wildcard."""
    if listen_host not in _WILDCARDS:
        return listen_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks which of our addresses leads outside
        return str(probe.getsockname()[0])
    return socket.gethostname()
