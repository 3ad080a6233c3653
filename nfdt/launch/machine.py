"""GPUs of this machine, and the address at which others reach it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

_WILDCARDS = ("0.0.0.0", "::")


def find_gpus(environment: Mapping[str, str], proc: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """GPUs to divide among worker slots, as named by ``CUDA_VISIBLE_DEVICES``; empty without any."""
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    return tuple(str(i) for i, _ in enumerate(proc.iterdir())) if proc.is_dir() else ()


def reachable_host(listen_host: str) -> str:
    """Host at which others reach a server that listens there: an address of this machine for a wildcard."""
    if listen_host not in _WILDCARDS:
        return listen_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: finds which local address leads outside
        return str(probe.getsockname()[0])
    return socket.gethostname()
