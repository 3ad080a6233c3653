"""Versions, addresses, GPUs, memory and processes of this machine, without importing Keras or TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import ipaddress
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfdt.core.host.keras_backend import current_backend

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h

_DISTRIBUTIONS = (
    ("keras", "keras"),
    ("tensorflow", "tensorflow-cpu"),
    ("tensorflow", "tensorflow"),
    ("jax", "jax"),
    ("torch", "torch"),
)


def versions() -> dict[str, str]:
    """Return Keras' backend, and the versions of Python, Keras, TensorFlow, JAX and PyTorch; "" where not installed.

    None of them is imported.
    """
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "backend": current_backend().name}
    for name, distribution in _DISTRIBUTIONS:
        found.setdefault(name, "")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def boot_id() -> str:
    """Return an identifier of this boot of this machine; equal for all processes on it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


def is_own_address(host: str, *, loopback: bool | None = None) -> bool:
    """Whether a host name or address belongs to this machine; with ``loopback``, whether it is its loopback."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return loopback is None or ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback is loopback


def find_gpus(environment: Mapping[str, str], proc: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Return the GPUs to divide among worker slots, as named by ``CUDA_VISIBLE_DEVICES``; empty without any."""
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    return tuple(str(i) for i, _ in enumerate(proc.iterdir())) if proc.is_dir() else ()


def share_gpus(gpus: Sequence[str], slots: int) -> tuple[str, ...]:
    """Return ``CUDA_VISIBLE_DEVICES`` of the slots of a machine: equally many GPUs for each, and at least one.

    With more slots than GPUs, some share one: the values are used in turn.
    """
    each = max(1, len(gpus) // max(1, slots))
    return tuple(",".join(gpus[first : first + each]) for first in range(0, len(gpus) - each + 1, each))


@dataclass(frozen=True)
class Memory:
    """Memory that processes on this machine can use, in bytes.

    Attributes:
        total: Memory of the machine, or of the container where that has a limit.
        available: Part of it that can be allocated before pages are swapped out or processes killed.
    """

    total: int
    available: int


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory that processes can use: the least of the machine's and its control groups'."""
    try:
        kilobytes = dict(re.findall(r"^(\w+): +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE))
        machine = Memory(int(kilobytes["MemTotal"]) * 1024, int(kilobytes["MemAvailable"]) * 1024)
    except (OSError, KeyError):
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(pages, pages)
    found = [machine, *_control_groups(root)]
    return Memory(min(one.total for one in found), max(0, min(one.available for one in found)))


_CONTROL_GROUPS = (  # mount, line of /proc/self/cgroup, limit, use, and the part of the use that can be freed at once
    ("sys/fs/cgroup", r"^0::(.*)$", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        r"^\d+:memory:(.*)$",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def _control_groups(root: Path) -> Iterator[Memory]:
    """Yield the memory of the control groups (versions 2 and 1) that contain this process and have a limit."""
    try:
        own = (root / "proc/self/cgroup").read_text()
    except OSError:
        return
    for mount, line, limit, use, cache in _CONTROL_GROUPS:
        if (found := re.search(line, own, re.MULTILINE)) is None:
            continue
        top = root / mount
        group = top / found[1].lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # no such group here, or "max": it has no limit
                most, used = int((folder / limit).read_text()), int((folder / use).read_text())
                files = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                yield Memory(most, most - used + (int(files[1]) if files else 0))


def use_one_arena() -> None:
    """Let all threads allocate from one arena, where the C library has several, each of which keeps what it has freed.

    For a process whose threads forward large messages; it slows down those that allocate all the time.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back_memory() -> int:
    """Collect garbage and return freed memory from the allocator to the system, where the C library supports that.

    Call it after memory-intensive work: models are reference cycles, and glibc keeps memory freed by many threads.

    Returns:
        The private resident memory that remains, in bytes; 0 where the system does not report it.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


def process_lives(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    except OSError:
        return not Path("/proc/self/stat").exists()  # without /proc, assume that it runs
