"""Transfers artifacts to and from a job server: named by hash, sent in chunks, resumed after a broken connection."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nfdt.core.arrays.pytree import as_array
from nfdt.core.arrays.safetensors_io import mapped
from nfdt.core.errors import ProtocolError, UsageError
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.deflated import Deflater
from nfdt.core.wire.status import translated
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State, StateRanges, load_state
from nfdt_client.connection import JobsClient

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 * 2**20
TRANSFER_TIMEOUT_S = 24 * 3600.0


class Blob:
    """Bytes in several pieces, hashed once; large arrays are referenced, not copied.

    Args:
        parts: The pieces in order. They must not change while the blob is in use: see :attr:`changed`.
        sha256: Their hash, if it is known.
    """

    def __init__(self, *parts: Any, sha256: str = "") -> None:
        self._parts = [memoryview(part).cast("B") for part in parts if len(part)]
        self.size = sum(len(part) for part in self._parts)
        self.sha256 = sha256 or self._hash()

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(part)
        return digest.hexdigest()

    @property
    def changed(self) -> bool:
        """Whether the pieces are other bytes than at first."""
        return self._hash() != self.sha256

    def chunks(self, offset: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) pieces of at most ``chunk_bytes``, from ``offset`` to the end."""
        start = 0
        for part in self._parts:
            for at in range(max(offset - start, 0), len(part), chunk_bytes):
                yield start + at, bytes(part[at : at + chunk_bytes])
            start += len(part)


def array_blob(array: np.ndarray[Any, Any]) -> Blob:
    """Return an array as the bytes of a ``.npy`` file; the memory of a contiguous array is shared.

    Raises:
        CaptureError: the array holds Python objects that are not strings.
    """
    array = as_array(array)
    array = np.ascontiguousarray(array).reshape(array.shape)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return Blob(header.getvalue(), array.reshape(-1).view(np.uint8) if array.size else b"")


def find_missing(connection: JobsClient, names: Iterable[str]) -> dict[str, int]:
    """Return the artifacts missing on the server, each with the number of bytes that it holds already."""
    reply = connection.call("FindMissing", pb.ArtifactNames(sha256=sorted(set(names))))
    return {item.sha256: int(item.have_bytes) for item in reply.missing}


def upload(connection: JobsClient, blobs: Mapping[str, Blob], *, waits: bool = False) -> int:
    """Send the artifacts missing on the server, each once; a broken transfer is resumed.

    Args:
        connection: Connection to the server.
        blobs: The artifacts by their names.
        waits: Whether to wait for room if the server's disk is full.

    Returns:
        Bytes sent.

    Raises:
        ServerUnreachable: the server has not answered for a while; see :meth:`JobsClient.persist`.
    """

    def send_missing() -> int:
        sent = 0
        for name, have_bytes in find_missing(connection, blobs).items():
            sent += _send(connection, blobs[name], have_bytes)
        return sent

    return connection.persist(send_missing, transfers=True, stores=waits)


def _send(connection: JobsClient, blob: Blob, have_bytes: int) -> int:
    # A server that was killed may hold all bytes of an unfinished artifact. A resumed upload would have no chunk.
    start = have_bytes if have_bytes < blob.size else 0

    def messages() -> Iterator[pb.Chunk]:
        head = pb.Chunk(sha256=blob.sha256, total_bytes=blob.size)
        if not blob.size:
            yield head
        deflater = Deflater()
        for offset, data in blob.chunks(start):
            packed, deflated = deflater.pack(data)
            chunk = pb.Chunk(offset=offset, data=packed, deflated=deflated)
            if offset == start:
                chunk.MergeFrom(head)
            yield chunk

    try:
        with translated(connection.address):
            receipt = connection.stub.Upload(messages(), timeout=TRANSFER_TIMEOUT_S)
    except ProtocolError as error:
        if not blob.changed:
            raise
        raise UsageError(
            "Data of fit: expected arrays that stay as they are while they are sent. Received: an array that was "
            "written to after fit began, by a callback for example. Keras copies arrays when fit begins: such a write "
            "has no effect there. Write to a copy, or give fit a keras.utils.PyDataset, whose attributes may change."
        ) from error
    if receipt.total_bytes != blob.size:
        raise ProtocolError(
            f"Upload of {blob.sha256}: the server holds {receipt.total_bytes} bytes. Expected: {blob.size}."
        )
    return blob.size - start


def download(connection: JobsClient, sha256: str) -> bytes:
    """Return the bytes of one artifact; see :func:`receive`."""
    file = io.BytesIO()
    receive(connection, sha256, file)
    return file.getvalue()


def open_artifact(connection: JobsClient, sha256: str) -> memoryview:
    """Return the bytes of one artifact, which may be large, as a view of a mapped file.

    It is the server's own file on its machine, else a file without a name; see :func:`receive`.
    """
    folder = connection.artifact_folder
    if folder is not None and os.access(folder / sha256, os.R_OK):
        return mapped(folder / sha256)
    with tempfile.NamedTemporaryFile() as file:
        receive(connection, sha256, file)
        file.flush()
        return mapped(Path(file.name))


def read_ranges(connection: JobsClient, sha256: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes of (offset, length) ranges of an artifact, one after the other, which is not fetched as a whole.

    Raises:
        ServerUnreachable: the server has not answered for a while; see :meth:`JobsClient.persist`.
    """
    folder = connection.artifact_folder
    if folder is not None and os.access(folder / sha256, os.R_OK):
        with (folder / sha256).open("rb") as file:
            return b"".join([os.pread(file.fileno(), length, offset) for offset, length in ranges])
    return b"".join(_download_range(connection, sha256, *each) for each in _joined(ranges))


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges with neighbours joined, without empty ones."""
    found: list[tuple[int, int]] = []
    for offset, length in ranges:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((offset, length))
    return found


def _download_range(connection: JobsClient, sha256: str, offset: int, length: int) -> bytes:
    data = bytearray()

    def fetch() -> None:
        with translated(connection.address):
            request = pb.DownloadRequest(sha256=sha256, offset=offset + len(data))
            chunks = connection.stub.Download(request, timeout=TRANSFER_TIMEOUT_S)
            for chunk in chunks:
                data.extend(chunk.data[: length - len(data)])
                if len(data) == length:
                    chunks.cancel()  # the rest is not wanted
                    return

    connection.persist(fetch, transfers=True)
    return bytes(data)


def receive(connection: JobsClient, sha256: str, file: Any) -> None:
    """Download one artifact to an empty binary file, and check its hash.

    Raises:
        ProtocolError: the received bytes have another hash.
        ServerUnreachable: the server has not answered for a while; see :meth:`JobsClient.persist`.
    """
    digest = hashlib.sha256()

    def fetch() -> None:
        with translated(connection.address):
            request = pb.DownloadRequest(sha256=sha256, offset=file.tell())
            for chunk in connection.stub.Download(request, timeout=TRANSFER_TIMEOUT_S):
                file.write(chunk.data)
                digest.update(chunk.data)

    connection.persist(fetch, transfers=True)
    if (arrived := digest.hexdigest()) != sha256:
        raise ProtocolError(f"Artifact {sha256}: {file.tell()} bytes arrived with the hash {arrived}.")


def fetch_state(connection: JobsClient, artifact: str, manifest: Manifest | None) -> State:
    """Return the state in an artifact, as views of a mapped file; without tables that shards make."""
    made = manifest.made if manifest is not None else {}
    if manifest is None or not made:
        return load_state(open_artifact(connection, artifact))
    slots = [index for index, owner in enumerate(manifest.optimizer_owners or ()) if owner in made]
    return StateRanges(partial(read_ranges, connection, artifact), manifest.layout, made).without(made, slots)
