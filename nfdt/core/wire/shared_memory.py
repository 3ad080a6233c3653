"""Memory shared by a worker and a shard on the same machine: gradients one way, weights the other.

The worker makes one anonymous in-memory file per stream and offers it on the stream. The shard fetches the file's
descriptor over a Unix socket, and both sides map it: success shows that they can share memory. The memory is freed
with the last of the two processes, however they end. Frames stay on the stream: order, errors, deadlines and
at-most-once are those of the stream.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import stat
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import Refused
from nfdt.core.host.machine import boot_id, memory
from nfdt.core.wire.channel import is_loopback
from nfdt.core.wire.passed_files import PassedFiles, fetch_files
from nfdt.core.wire.shards_pb2 import OFFER, Frame

Area = npt.NDArray[np.float32]

MOST_OF_FREE = 0.5  # share of the free memory that one segment may take


@dataclass(frozen=True)
class Segment:
    """The areas of a mapped file, each of shape ``(n,)`` float32 and at the start of a page.

    They keep the mapping alive, and so do tensors over them. There is a pair of areas for every request that may be
    unanswered at a time. Both sides use the pairs in turn, by sequence number.

    Attributes:
        gradients: Written by the worker before a push; the shard reads the area until it has answered.
        replies: Written by the shard in answer to a request of this worker, and at no other time. The worker's view is
            therefore valid until the worker has sent as many requests as there are pairs.
    """

    gradients: tuple[Area, ...]
    replies: tuple[Area, ...]

    def gradient(self, sequence: int) -> Area:
        """Return the area for the gradient of the push ``sequence``."""
        return self.gradients[sequence % len(self.gradients)]

    def weights(self, sequence: int) -> Area:
        """Return the area for the weights that answer the request ``sequence``."""
        return self.replies[sequence % len(self.replies)]


class Offer:
    """A new segment, made by the worker, and a socket from which the shard fetches it.

    Args:
        area_bytes: Size of the shard's weights.
        pairs: Requests that may be unanswered at a time.

    Raises:
        OSError: the system does not support it, or there is not enough memory left.
    """

    def __init__(self, area_bytes: int, *, pairs: int = 1) -> None:
        self.mapped = False
        self._area_bytes = area_bytes
        file = _make_file(segment_bytes(area_bytes, pairs))
        try:
            self.segment = _map(file, area_bytes, pairs)
            self._passed = PassedFiles([file])
        except RuntimeError as error:  # no thread can be started
            raise OSError(errno.EAGAIN, str(error)) from error
        finally:
            os.close(file)

    @property
    def name(self) -> str:
        """Name of the socket from which the shard fetches the segment."""
        return self._passed.name

    def frame(self, worker: str) -> Frame:
        """Return the frame that offers the segment to the shard."""
        return Frame(kind=OFFER, worker=worker, segment=self.name, boot_id=boot_id(), total_bytes=self._area_bytes)

    def conclude(self, *, mapped: bool) -> None:
        """Record the shard's answer, whether it has mapped the segment, and stop handing out the file."""
        self.mapped = mapped
        self.withdraw()

    def withdraw(self) -> None:
        """Stop handing out the file; mapped memory stays mapped. Can be called twice."""
        self._passed.withdraw()


def accept(offer: Frame, area_bytes: int, *, pairs: int = 1) -> Segment:
    """Fetch and map the segment that a worker offers; called by the shard.

    The offer comes from the network. A file is mapped only if a process of this user on this machine hands it out, and
    if it lies in memory, has the exact size, and cannot shrink any more.

    Args:
        offer: A frame of kind OFFER.
        area_bytes: Size of this shard's weights.
        pairs: Requests that may be unanswered at a time.

    Raises:
        Refused: the offer is invalid, or comes from another machine; the stream carries the payloads then.
        OSError: it cannot be mapped.
    """
    if offer.boot_id != boot_id():
        raise Refused("Segment: expected one on this machine. Received: another machine's.")
    if offer.total_bytes != area_bytes:
        raise Refused(f"Segment: expected {area_bytes} bytes of weights. Received: {offer.total_bytes}.")
    files = fetch_files(offer.segment)
    try:
        _check(files[0], segment_bytes(area_bytes, pairs))
        return _map(files[0], area_bytes, pairs)
    finally:
        for file in files:
            os.close(file)


def segment_bytes(area_bytes: int, pairs: int = 1) -> int:
    """Return the size of a file with ``pairs`` pairs of areas, each of whole pages."""
    return 2 * pairs * _whole_pages(area_bytes)


def is_this_machine(host: str) -> bool:
    """Return whether ``host`` is an address of this machine, so that shared memory can be offered."""
    if is_loopback(host):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _make_file(size: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "This system has no files in memory without a name")
    if size > memory().available * MOST_OF_FREE:  # more could trigger the out-of-memory killer, also for this process
        raise OSError(errno.ENOMEM, f"{size} bytes are more than {MOST_OF_FREE:.0%} of the memory that is free")
    file = os.memfd_create("nfdt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
    except BaseException:
        os.close(file)
        raise
    return file


def _seals() -> int:
    """Return the seals that fix the file's size: access to mapped pages beyond a truncated end kills the process."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _check(file: int, size: int) -> None:
    found = os.fstat(file)
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() == _seals()
    except OSError:  # not in memory
        sealed = False
    if not stat.S_ISREG(found.st_mode) or found.st_size != size or not sealed:
        raise Refused(
            f"Segment: expected a file in memory of {size} bytes whose size is sealed. Received: "
            f"{stat.filemode(found.st_mode)}, {found.st_size} bytes, {'sealed' if sealed else 'not sealed'}."
        )


def _map(file: int, area_bytes: int, pairs: int) -> Segment:
    populate: int = getattr(mmap, "MAP_POPULATE", 0)
    memory: Any = mmap.mmap(file, segment_bytes(area_bytes, pairs), flags=mmap.MAP_SHARED | populate)
    starts = range(0, segment_bytes(area_bytes, pairs), _whole_pages(area_bytes) or 1)
    areas = [np.frombuffer(memory, np.float32, area_bytes // 4, offset=start) for start in starts]
    return Segment(tuple(areas[0::2]), tuple(areas[1::2]))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
