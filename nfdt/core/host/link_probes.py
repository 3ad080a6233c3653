"""Probes of silent connections, by which a machine without power is noticed within seconds."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

VARIABLE = "HFDT_LINK_PROBES"  # of the ranks of a ring


@dataclass(frozen=True)
class LinkProbes:
    """Probes of a silent connection. The other machine's kernel answers them, also for a process that computes.

    Attributes:
        every_s: Seconds of silence before each probe.
        count: Number of probes without an answer after which the other machine is lost.
    """

    every_s: int = 2
    count: int = 3

    @classmethod
    def within(cls, heartbeat_s: float, lost_s: float) -> Self:
        """Return the probes for machines that are lost after ``lost_s``: kernels and ssh count whole seconds."""
        every_s = max(1, round(heartbeat_s))
        return cls(every_s, max(1, math.ceil(lost_s / every_s) - 1))

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Return the probes that :data:`VARIABLE` describes; the default ones without it."""
        return cls.parse(text) if (text := environment.get(VARIABLE)) else cls()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the probes of a text such as ``2,3``: seconds, and number."""
        every_s, count = map(int, text.split(","))
        return cls(every_s, count)

    def __str__(self) -> str:
        return f"{self.every_s},{self.count}"

    @property
    def lost_s(self) -> int:
        """Seconds of silence after which the other machine is lost."""
        return self.every_s * (self.count + 1)

    @property
    def ssh_options(self) -> tuple[str, ...]:
        """Options of ``ssh``, which ends when its machine is lost, and names the machine."""
        values: dict[str, object] = {
            "ConnectTimeout": self.lost_s,
            "ServerAliveInterval": self.every_s,
            "ServerAliveCountMax": self.count,
            "LogLevel": "INFO",  # at which it names the machine
        }
        return tuple(part for name, value in values.items() for part in ("-o", f"{name}={value}"))

    def apply(self, connection: socket.socket) -> None:
        """Let a TCP connection fail when its other machine is lost, whether it is silent or its data are not taken."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        values = {
            "TCP_KEEPIDLE": self.every_s,
            "TCP_KEEPINTVL": self.every_s,
            "TCP_KEEPCNT": self.count,
            "TCP_USER_TIMEOUT": 1000 * self.lost_s,
        }
        for name, value in values.items():
            if (option := getattr(socket, name, None)) is not None:  # those that this system has
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
