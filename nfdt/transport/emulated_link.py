"""Emulation of a slower link than the real one, for experiments on one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nfdt.core.specs.emulation import Emulation


class EmulatedLink:
    """Link that delays messages by their transfer time.

    Each direction has the full bandwidth. All shards of a worker are behind one link: their messages queue up.
    Thread-safe.

    Args:
        bandwidth_mbit: Bandwidth in 10^6 bits per second; None for no limit.
        latency_ms: Latency of one direction.
        stopped: Event that ends every wait.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        bandwidth_mbit: float | None,
        latency_ms: float,
        stopped: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._latency_s = latency_ms / 1000
        self._s_per_byte = 8e-6 / bandwidth_mbit if bandwidth_mbit else 0.0
        self._stopped = stopped
        self._lock = threading.Lock()
        self._free_at = {"up": 0.0, "down": 0.0}  # by direction

    def send(self, payload_bytes: int, since: float) -> None:
        """Wait until a message that was ready at ``since`` (monotonic clock) reaches the shard, or the job ends."""
        self._carry("up", payload_bytes, since)

    def receive(self, payload_bytes: int, since: float) -> None:
        """Wait until a shard's reply arrives; see :meth:`send`."""
        self._carry("down", payload_bytes, since)

    def _carry(self, direction: str, payload_bytes: int, since: float) -> None:
        with self._lock:
            free_at = max(self._free_at[direction], since) + payload_bytes * self._s_per_byte
            self._free_at[direction], due = free_at, free_at + self._latency_s
        self._stopped.wait(max(0.0, due - self._clock()))


def make_link(emulate: Emulation, worker: int, stopped: threading.Event) -> EmulatedLink | None:
    """Return the emulated link of worker number ``worker``; None for the real one."""
    bandwidth, latency = emulate.link_of(worker)
    return EmulatedLink(bandwidth, latency, stopped) if bandwidth or latency else None
