"""GPUs of this machine, and its address for other machines."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

_WILDCARDS = ("0.0.0.0", "::")


def find_gpus(environment: Mapping[str, str], proc: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Return the GPUs to divide among worker slots, as named by ``CUDA_VISIBLE_DEVICES``; empty without any."""
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    return tuple(str(i) for i, _ in enumerate(proc.iterdir())) if proc.is_dir() else ()


def reachable_host(listen_host: str) -> str:
    """Return the host at which other machines reach a server: for a wildcard, an address of this machine."""
    if listen_host not in _WILDCARDS:
        return listen_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: finds the local address of the outgoing route
        return str(probe.getsockname()[0])
    return socket.gethostname()
