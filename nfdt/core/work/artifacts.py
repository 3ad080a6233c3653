"""A job's artifacts on a slot: read in place on the server's machine, else fetched once and cached."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ProtocolError
from nfdt.core.host.private_files import replacing
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.status import translated

FETCH_TIMEOUT_S = 600.0


def artifact_names(spec: JobSpec) -> set[str]:
    """Return the artifacts that a job's specification names, by sha256."""
    validation = spec.validation.arrays if spec.validation else ()
    return {spec.program, *spec.artifacts, *spec.train.arrays, *validation}


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
    """

    def __init__(self, stub: Any, job_id: str, shared: str, cache: Path, address: str) -> None:
        self._stub, self._job_id, self._address = stub, job_id, address
        self._shared = Path(shared) if shared and os.access(shared, os.R_OK | os.X_OK) else None
        self._cache = cache

    def path(self, sha256: str) -> Path:
        """Return a local file with the artifact's bytes.

        Raises:
            NfdtError: the server does not have the artifact, or the received bytes have another hash.
        """
        if not sha256 or Path(sha256).name != sha256:
            raise ProtocolError(f"Artifact name: expected a sha256. Received: {sha256[:80]!r}.")
        if self._shared is not None:
            return self._shared / sha256
        target = self._cache / sha256
        if not target.exists():
            self._fetch(sha256, target)
        return target

    def read(self, sha256: str) -> bytes:
        """Return the artifact's bytes."""
        return self.path(sha256).read_bytes()

    def open_array(self, sha256: str) -> Array:
        """Return the artifact, a ``.npy`` file, memory-mapped."""
        return np.load(self.path(sha256), mmap_mode="r", allow_pickle=False)

    def _fetch(self, sha256: str, target: Path) -> None:
        self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256()
        request = pb.FetchRequest(job_id=self._job_id, sha256=sha256)
        with translated(self._address), replacing(target) as file:
            for data in self._checked(self._stub.Fetch(request, timeout=FETCH_TIMEOUT_S)):
                digest.update(data)
                file.write(data)
            if digest.hexdigest() != sha256:
                raise ProtocolError(
                    f"Artifact from {self._address}: expected sha256 {sha256}. Received: {digest.hexdigest()}. "
                    "Run the job again."
                )

    def _checked(self, chunks: Iterable[pb.FetchChunk]) -> Iterator[bytes]:
        """Yield the data of the chunks, checked to be consecutive and within the size that the first one states."""
        at, total = 0, None
        for chunk in chunks:
            total = chunk.total_bytes if total is None else total
            if chunk.offset != at or at + len(chunk.data) > total:
                raise ProtocolError(
                    f"Artifact from {self._address}: expected byte {at} of {total}. "
                    f"Received: {len(chunk.data)} bytes at {chunk.offset}."
                )
            yield chunk.data
            at += len(chunk.data)
