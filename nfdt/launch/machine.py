"""What this machine has: installed versions, GPUs, and the address others reach it at."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

_WILDCARDS = ("0.0.0.0", "::")


def versions() -> dict[str, str]:
    """Python, Keras and TensorFlow of this machine, without importing them; "" where not installed."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "keras": "", "tensorflow": ""}
    for name, distribution in (("keras", "keras"), ("tensorflow", "tensorflow-cpu"), ("tensorflow", "tensorflow")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


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


def boot_id() -> str:
    """Which start of which machine this is; equal for all processes on it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()
