"""Emulator of a bad link: forwards frames between two interfaces, with loss, bit errors and delay.

The kernel's own emulator (``netem``) is a module that many kernels lack.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass
from random import Random

ALL_PROTOCOLS = 3
IPV4 = b"\x08\x00"
HEADER = 14  # bytes of Ethernet
LARGEST = 65536
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)  # ethtool's numbers: sums of sent frames, their segmentation for TCP, and for all


@dataclass(frozen=True)
class LinkDamage:
    """Damage to each frame, in both directions.

    Attributes:
        loss: Probability that it is lost.
        corruption: Probability that one of its bits is flipped. Frames without a checksum, those of ARP, are spared.
        delay_ms: Its delay.
    """

    loss: float = 0.0
    corruption: float = 0.0
    delay_ms: float = 0.0


def damaged(frame: bytes, damage: LinkDamage, random: Random) -> bytes | None:
    """Return a frame as it arrives; None if it is lost."""
    if random.random() < damage.loss:
        return None
    if random.random() >= damage.corruption or frame[12:HEADER] != IPV4:
        return frame
    changed = bytearray(frame)
    changed[random.randrange(HEADER, len(frame))] ^= 1 << random.randrange(8)
    return bytes(changed)


def disable_offloads(interface: str) -> None:
    """Let the system complete the sums of frames and split long ones before they reach the interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for feature in OFFLOADS:
            value = array.array("I", [feature, 0])
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), value.buffer_info()[0]))


def forward(interfaces: list[str], damage: LinkDamage, random: Random) -> None:
    """Forward frames between two interfaces until the process ends."""
    near, far = (socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) for _ in interfaces)
    others = {near: far, far: near}
    for end, interface in zip(others, interfaces, strict=True):
        end.bind((interface, 0))
        end.setblocking(False)
    print("ready", flush=True)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(list(others), [], [], timeout)[0]:
            for frame in _received(source):
                if (arriving := damaged(frame, damage, random)) is not None:
                    due, count = time.monotonic() + damage.delay_ms / 1000, count + 1
                    heapq.heappush(waiting, (due, count, others[source], arriving))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            _send(target, frame)


def _received(source: socket.socket) -> list[bytes]:
    """Return the frames that have arrived, without those that this machine sends."""
    frames = []
    while True:
        try:
            frame, (_, _, kind, *_) = source.recvfrom(LARGEST)
        except OSError:  # no more, or the interface is down
            return frames
        if kind != socket.PACKET_OUTGOING:
            frames.append(frame)


def _send(target: socket.socket, frame: bytes) -> None:
    try:
        target.send(frame)
    except OSError:  # a full queue, or the interface is down: the frame is lost
        pass


def main() -> None:
    """Forward between two interfaces.

    The arguments are their names, that of the second one's peer, and the numbers of :class:`LinkDamage`.
    """
    near, far, peer, *numbers = sys.argv[1:]
    disable_offloads(peer)
    forward([near, far], LinkDamage(*map(float, numbers)), Random())
