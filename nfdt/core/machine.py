"""What this machine and this Python are, for others to compare; without importing Keras or TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import socket
from pathlib import Path


def versions() -> dict[str, str]:
    """Python, Keras and TensorFlow of this machine, without importing them; "" where not installed."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "keras": "", "tensorflow": ""}
    for name, distribution in (("keras", "keras"), ("tensorflow", "tensorflow-cpu"), ("tensorflow", "tensorflow")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def boot_id() -> str:
    """Which start of which machine this is; equal for all processes on it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()
