"""Artifacts of a job on a slot: read in place where possible, otherwise fetched once and cached."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import mapped
from nfdt.core.errors import ProtocolError, ServerUnreachable
from nfdt.core.host.private_files import replacing
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.chunks import CHUNK_BYTES
from nfdt.core.wire.deflated import inflated
from nfdt.core.wire.status import translated
from nfdt.core.work.patience import Patience
from nfdt.core.work.remote_rows import HEADER_BYTES, PIECE_BYTES, RemoteRows, read_header
from nfdt.core.work.slot_connection import PATIENCE_S

FETCH_TIMEOUT_S = 600.0
WHOLE_BYTES = 256 * 2**20
MAPPED_BYTES = 2**20


def artifact_names(spec: JobSpec) -> set[str]:
    """Return the artifacts that a job's specification names, by sha256."""
    validation = spec.validation.arrays if spec.validation else ()
    records = spec.fit.begun.records if spec.fit.begun is not None else ""
    callbacks = spec.callbacks.artifacts if spec.callbacks is not None else ()
    return {spec.program, *spec.artifacts, *spec.train.arrays, *validation, *callbacks, *filter(None, [records])}


def default_cache() -> Path:
    """Return the directory of fetched artifacts; ``XDG_CACHE_HOME`` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nfdt" / "artifacts"


class ArtifactReader:
    """Reads the artifacts of one job.

    Args:
        stub: Stub of the Workers service.
        job_id: The job.
        shared: The server's artifact directory where it can be read in place; "" where it cannot.
        cache: Directory for fetched artifacts.
        address: Address of the server, for error messages.
        whole_bytes: Size up to which an array is fetched whole, and memory for the rows of a larger one.

    Attributes:
        fetched_bytes: Number of bytes fetched.
    """

    def __init__(
        self, stub: Any, job_id: str, shared: str, cache: Path, address: str, whole_bytes: int = WHOLE_BYTES
    ) -> None:
        self._stub, self._job_id, self._address = stub, job_id, address
        self._shared = Path(shared) if shared and os.access(shared, os.R_OK | os.X_OK) else None
        self._cache = cache
        self._whole_bytes = whole_bytes
        self._sizes: dict[str, int] = {}
        self.fetched_bytes = 0

    def path(self, sha256: str) -> Path:
        """Return a local file with the artifact's bytes.

        Raises:
            NfdtError: the server does not have the artifact, or the received bytes have another hash.
        """
        if not sha256 or Path(sha256).name != sha256:  # it must not leave the directory
            raise ProtocolError(f"Artifact name: expected a sha256. Received: {sha256[:80]!r}.")
        if self._is_in_place(sha256):
            assert self._shared is not None
            return self._shared / sha256
        target = self._cache / sha256
        if not target.exists():
            self._fetch(sha256, target)
        return target

    def _is_in_place(self, sha256: str) -> bool:
        """Whether the server's file is on this machine."""
        if self._shared is None:
            return False
        file = self._shared / sha256
        # The size is compared because another machine may have a directory of the same name with an unfinished file.
        return file.is_file() and file.stat().st_size == self._size(sha256)

    def _size(self, sha256: str) -> int:
        """Return the size of an artifact on the server, in bytes."""
        if sha256 not in self._sizes:
            request = pb.FetchRequest(job_id=self._job_id, sha256=sha256, ranges=[pb.ByteRange()])
            with translated(self._address):
                (chunk,) = self._stub.Fetch(request, timeout=FETCH_TIMEOUT_S)
            self._sizes[sha256] = int(chunk.total_bytes)
        return self._sizes[sha256]

    def read(self, sha256: str) -> bytes | memoryview:
        """Return the artifact's bytes; those of a large one as a view of the mapped file."""
        path = self.path(sha256)
        return mapped(path) if path.stat().st_size > MAPPED_BYTES else path.read_bytes()

    def read_ranges(self, sha256: str, ranges: Sequence[tuple[int, int]]) -> bytes:
        """Return the bytes of (offset, length) ranges of the artifact, which is not fetched as a whole.

        Raises:
            NfdtError: the server refuses, or did not answer in time.
        """
        if not self._is_in_place(sha256) and not (self._cache / sha256).exists():
            return b"".join(data for part in _parts(ranges) for data in self.fetch_ranges(sha256, part))
        with self.path(sha256).open("rb") as file:
            return b"".join([os.pread(file.fileno(), length, offset) for offset, length in ranges])

    def open_array(self, sha256: str) -> Array:
        """Return the artifact, a ``.npy`` file, memory-mapped."""
        return np.load(self.path(sha256), mmap_mode="r", allow_pickle=False)

    def open_rows(self, sha256: str) -> Array | RemoteRows:
        """Return the artifact, a ``.npy`` file, memory-mapped; or its rows on request, if it is large and not here."""
        local = self._is_in_place(sha256) or (self._cache / sha256).exists()
        size = 0 if local else self._size(sha256)
        if size <= self._whole_bytes:
            return self.open_array(sha256)
        header = read_header(b"".join(self.fetch_ranges(sha256, [(0, min(size, HEADER_BYTES))])), size)
        if header is None or not 0 < header.row_bytes <= PIECE_BYTES:
            return self.open_array(sha256)
        return RemoteRows(header, lambda ranges: self.fetch_ranges(sha256, ranges), self._whole_bytes)

    def fetch_ranges(self, sha256: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of ranges of an artifact, one after the other; a broken transfer is resumed.

        Raises:
            NfdtError: the server refuses, or did not answer in time.
        """
        patience, left = Patience(PATIENCE_S), list(ranges)
        while left:
            wanted = [pb.ByteRange(offset=offset, length=length) for offset, length in left]
            request = pb.FetchRequest(job_id=self._job_id, sha256=sha256, ranges=wanted)
            try:
                with translated(self._address):
                    for chunk in self._stub.Fetch(request, timeout=FETCH_TIMEOUT_S):
                        patience.success()
                        data = _data(chunk)
                        left = _without(left, len(data))
                        self.fetched_bytes += len(data)
                        yield data
                if left:
                    raise ProtocolError(f"Artifact from {self._address}: expected {left[0][1]} more bytes.")
            except ServerUnreachable as error:
                patience.again(error)

    def _fetch(self, sha256: str, target: Path) -> None:
        self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256()
        request = pb.FetchRequest(job_id=self._job_id, sha256=sha256)
        with translated(self._address), replacing(target) as file:
            for data in self._checked(self._stub.Fetch(request, timeout=FETCH_TIMEOUT_S)):
                digest.update(data)
                file.write(data)
                self.fetched_bytes += len(data)
            if digest.hexdigest() != sha256:
                raise ProtocolError(
                    f"Artifact from {self._address}: expected sha256 {sha256}. Received: {digest.hexdigest()}. "
                    "Run the job again."
                )

    def _checked(self, chunks: Iterable[pb.FetchChunk]) -> Iterator[bytes]:
        """Yield the data of the chunks, checked to be consecutive and within the size that the first one states."""
        at, total = 0, None
        for chunk in chunks:
            total, data = chunk.total_bytes if total is None else total, _data(chunk)
            if chunk.offset != at or at + len(data) > total:
                raise ProtocolError(
                    f"Artifact from {self._address}: expected byte {at} of {total}. "
                    f"Received: {len(data)} bytes at {chunk.offset}."
                )
            yield data
            at += len(data)


def _data(chunk: pb.FetchChunk) -> bytes:
    return inflated(chunk.data, chunk.deflated, 2 * CHUNK_BYTES)


def _parts(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges, long ones in pieces, in the lists of at most ``PIECE_BYTES`` that one call may ask for."""
    part, size = list[tuple[int, int]](), 0
    for offset, length in ranges:
        for at in range(offset, offset + length, PIECE_BYTES):
            piece = min(PIECE_BYTES, offset + length - at)
            if size + piece > PIECE_BYTES:
                yield part
                part, size = [], 0
            part.append((at, piece))
            size += piece
    if part:
        yield part


def _without(ranges: list[tuple[int, int]], received: int) -> list[tuple[int, int]]:
    """Return the rest of some ranges after their first ``received`` bytes.

    Raises:
        ProtocolError: they have fewer bytes.
    """
    for number, (offset, length) in enumerate(ranges):
        if received < length:
            return [(offset + received, length - received), *ranges[number + 1 :]]
        received -= length
    if received:
        raise ProtocolError(f"Artifact: expected the bytes of the ranges. Received: {received} bytes more.")
    return []
