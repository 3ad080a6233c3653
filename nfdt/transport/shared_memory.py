"""Memory that a worker and a shard of the same machine share: gradients one way, weights the other.

The worker makes one file per stream, offers its name on the stream, and both sides map it. Its name is gone as soon as
the shard has mapped it: the memory then goes with the last of the two processes, whatever ends them. What the frames
say stays on the stream: order, errors, deadlines and at-most-once are those of the stream.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import Refused
from nfdt.core.machine import boot_id
from nfdt.core.wire.channel import is_loopback
from nfdt.core.wire.shards_pb2 import OFFER, Frame

Area = npt.NDArray[np.float32]

DIRECTORY = Path("/dev/shm")
PREFIX = "nfdt-"

_NAME = re.compile(PREFIX + r"[0-9a-f]{32}")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class Segment:
    """The areas of a mapped file, each of shape ``(n,)`` float32 and at the start of a page.

    They keep the mapping alive, and so do tensors over them. There is a pair of areas for every request that may be
    unanswered at a time: both sides use them in turn, by sequence number.

    Attributes:
        gradients: Written by the worker before a push; the shard reads it until it has answered.
        replies: Written by the shard in answer to a request of this worker, and at no other time. The worker's view of
            it therefore stays as it is until that worker has asked as often as there are pairs.
    """

    gradients: tuple[Area, ...]
    replies: tuple[Area, ...]

    def gradient(self, sequence: int) -> Area:
        """Where the gradient of the push ``sequence`` lies."""
        return self.gradients[sequence % len(self.gradients)]

    def weights(self, sequence: int) -> Area:
        """Where the weights that answer the request ``sequence`` lie."""
        return self.replies[sequence % len(self.replies)]


class Offer:
    """The worker's side: a new segment, and its name until the shard has answered.

    Args:
        area_bytes: Of the shard's weights.
        pairs: Requests that may be unanswered at a time.

    Raises:
        OSError: this machine has no such directory, or not enough room in it.
    """

    def __init__(self, area_bytes: int, *, pairs: int = 1) -> None:
        self.name = PREFIX + secrets.token_hex(16)
        self.mapped = False
        self._area_bytes = area_bytes
        file = os.open(DIRECTORY / self.name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Without room set aside, a full directory would kill the process that touches the memory.
            os.posix_fallocate(file, 0, segment_bytes(area_bytes, pairs))
            self.segment = _map(file, area_bytes, pairs)
        except BaseException:
            self.withdraw()
            raise
        finally:
            os.close(file)

    def frame(self, worker: str) -> Frame:
        """What the shard is told."""
        return Frame(kind=OFFER, worker=worker, segment=self.name, boot_id=boot_id(), total_bytes=self._area_bytes)

    def settle(self, *, mapped: bool) -> None:
        """The shard has answered: from now on use the segment, or never."""
        self.mapped = mapped
        self.withdraw()

    def withdraw(self) -> None:
        """Remove the name; what is mapped stays mapped. Can be called twice."""
        (DIRECTORY / self.name).unlink(missing_ok=True)


def accept(offer: Frame, area_bytes: int, *, pairs: int = 1) -> Segment:
    """The shard's side: map what a worker offers, and remove its name.

    The name comes from the network: only a regular file of our own, private, of the exact size and directly in
    ``DIRECTORY`` is mapped.

    Args:
        offer: A frame of kind OFFER.
        area_bytes: Of this shard's weights.
        pairs: Requests that may be unanswered at a time.

    Raises:
        Refused: it is something else, or lies on another machine; the stream carries the bytes then.
        OSError: it cannot be mapped.
    """
    if offer.boot_id != boot_id():
        raise Refused("Segment: expected one on this machine. Received: another machine's.")
    if not _NAME.fullmatch(offer.segment):
        raise Refused(f"Segment: expected a name like {PREFIX}<32 hex digits>. Received: {offer.segment[:80]!r}.")
    if offer.total_bytes != area_bytes:
        raise Refused(f"Segment: expected {area_bytes} bytes of weights. Received: {offer.total_bytes}.")
    try:
        file = os.open(DIRECTORY / offer.segment, _FLAGS)
    except OSError as error:
        raise Refused(f"Segment: expected a file that this process can open. Received: {error.strerror}.") from None
    try:
        _check(os.fstat(file), segment_bytes(area_bytes, pairs))
        segment = _map(file, area_bytes, pairs)
    finally:
        os.close(file)
    (DIRECTORY / offer.segment).unlink(missing_ok=True)
    return segment


def segment_bytes(area_bytes: int, pairs: int = 1) -> int:
    """Of a file with so many pairs of areas, each of whole pages."""
    return 2 * pairs * _whole_pages(area_bytes)


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is an address of this machine: only then is it worth offering memory."""
    if is_loopback(host):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _check(found: os.stat_result, size: int) -> None:
    private = not found.st_mode & 0o077
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not private or found.st_size != size:
        raise Refused(
            f"Segment: expected a regular file of user {os.geteuid()}, mode 0600, {size} bytes. Received: user "
            f"{found.st_uid}, mode {stat.filemode(found.st_mode)}, {found.st_size} bytes."
        )


def _map(file: int, area_bytes: int, pairs: int) -> Segment:
    populate: int = getattr(mmap, "MAP_POPULATE", 0)
    memory: Any = mmap.mmap(file, segment_bytes(area_bytes, pairs), flags=mmap.MAP_SHARED | populate)
    starts = range(0, segment_bytes(area_bytes, pairs), _whole_pages(area_bytes) or 1)
    areas = [np.frombuffer(memory, np.float32, area_bytes // 4, offset=start) for start in starts]
    return Segment(tuple(areas[0::2]), tuple(areas[1::2]))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
