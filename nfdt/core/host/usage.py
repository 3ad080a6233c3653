"""What this process and its machine use: processor time, memory, and GPUs where NVIDIA's library is there."""

from __future__ import annotations

import functools
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nfdt.core.host.machine import find_gpus, memory

EVERY_S = 1.0


def process_usage() -> dict[str, float]:
    """Return the processor time of this process in seconds, and the most memory that it has had at a time."""
    used = resource.getrusage(resource.RUSAGE_SELF)  # some microseconds: it is called for every task
    unit = 1 if sys.platform == "darwin" else 1024
    return {"cpu_s": round(used.ru_utime + used.ru_stime, 3), "peak_memory_bytes": used.ru_maxrss * unit}


@dataclass(frozen=True)
class GpuUsage:
    """Use of one GPU by all processes together.

    Attributes:
        uuid: Its identifier.
        use: Share of the last interval, of up to a second, in which it computed; None: it does not say.
        memory_bytes: Memory in use.
        total_bytes: All of its memory.
    """

    uuid: str
    use: float | None
    memory_bytes: int
    total_bytes: int


class UsageMeter:
    """Meter of this process and its machine.

    Args:
        environment: Names the GPUs of this process, see :func:`~nfdt.core.host.machine.find_gpus`.
        clock: Returns seconds.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._environment, self._clock = environment, clock
        self._totals: dict[str, float] = {}
        self._totals_at = -math.inf
        self._spent: tuple[float, float, float] | None = None  # time, processor time, idle time of all cores

    @property
    def due(self) -> bool:
        """Whether the last call of :meth:`of_machine` is :data:`EVERY_S` ago."""
        return self._spent is None or self._clock() - self._spent[0] >= EVERY_S

    def of_process(self) -> dict[str, float]:
        """Return the use of this process for its statistics.

        Returns:
            :func:`process_usage`, ``memory_bytes``, the resident memory, and with GPUs ``gpu_memory_bytes``, their sum,
            and ``gpu_use``, their mean. All but the first are up to :data:`EVERY_S` old.
        """
        if (now := self._clock()) - self._totals_at >= EVERY_S:
            self._totals_at = now
            gpus = self.gpus()
            uses = [gpu.use for gpu in gpus if gpu.use is not None]
            self._totals = {"memory_bytes": self._process.memory_info().rss}
            if gpus:
                self._totals["gpu_memory_bytes"] = sum(gpu.memory_bytes for gpu in gpus)
            if uses:
                self._totals["gpu_use"] = round(sum(uses) / len(uses), 3)
        return {**process_usage(), **self._totals}

    def of_machine(self) -> dict[str, Any]:
        """Return the fields of a ``Usage`` message but ``gpus``; processor time is that since the call before."""
        import psutil  # clients need not have it

        own, found, count = process_usage(), memory(), psutil.cpu_count() or 1
        idle = psutil.cpu_times()
        spent = self._clock(), own["cpu_s"], idle.idle + getattr(idle, "iowait", 0.0)
        before, self._spent = self._spent or spent, spent
        seconds, used_s, idle_s = (later - earlier for later, earlier in zip(spent, before, strict=True))
        return {
            "cores": used_s / seconds if seconds else 0.0,
            "memory_bytes": self._process.memory_info().rss,
            "peak_memory_bytes": int(own["peak_memory_bytes"]),
            "busy_cores": min(max(0.0, count - idle_s / seconds), count) if seconds else 0.0,
            "machine_cores": count,
            "used_bytes": found.total - found.available,
            "total_bytes": found.total,
        }

    def gpus(self) -> tuple[GpuUsage, ...]:
        """Return the use of the GPUs that this process may use; empty without any, or without their library."""
        found = []
        for uuid, handle in self._handles:
            try:
                held = self._library.nvmlDeviceGetMemoryInfo(handle)
                found.append(GpuUsage(uuid, self._use(handle), held.used, held.total))
            except self._library.NVMLError:
                continue  # it has gone
        return tuple(found)

    def _use(self, handle: Any) -> float | None:
        try:
            return float(self._library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._library.NVMLError:  # a part of a GPU does not say
            return None

    @functools.cached_property
    def _process(self) -> Any:
        import psutil

        return psutil.Process()

    @functools.cached_property
    def _library(self) -> Any:
        import pynvml

        return pynvml

    @functools.cached_property
    def _handles(self) -> list[tuple[str, Any]]:
        """Identifier and handle of each GPU; numbers are those of the order on the PCI bus."""
        names = find_gpus(self._environment)
        if not names:
            return []
        try:
            library = self._library
            library.nvmlInit()
        except ImportError:
            return []
        except library.NVMLError:
            return []
        found = []
        for name in names:
            by_number = library.nvmlDeviceGetHandleByIndex
            try:
                handle = by_number(int(name)) if name.isdecimal() else library.nvmlDeviceGetHandleByUUID(name)
                found.append((library.nvmlDeviceGetUUID(handle), handle))
            except library.NVMLError:
                continue
        return found
