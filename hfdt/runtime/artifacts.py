"""A job's artifacts on each rank: read from the server's directory if possible, else from copies that rank 0 sends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hfdt.runtime.communicator import Communicator
from nfdt.core.arrays.layout import Array
from nfdt.core.host.private_files import replacing
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.artifacts import ArtifactReader, artifact_names, default_cache


class RankArtifacts:
    """Artifacts on this rank, as returned by :func:`share`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, sha256: str) -> Path:
        """Return the path of an artifact's local file."""
        return self._folder / sha256

    def read(self, sha256: str) -> bytes:
        """Return the bytes of an artifact."""
        return self.path(sha256).read_bytes()

    def open_array(self, sha256: str) -> Array:
        """Return the artifact, a ``.npy`` file, memory-mapped."""
        return np.load(self.path(sha256), mmap_mode="r", allow_pickle=False)

    open_rows = open_array


ReadableArtifacts = RankArtifacts | ArtifactReader  # of a launched rank, and of a slot
OpenArtifacts = Callable[[JobSpec, str], ReadableArtifacts]
"""Makes the artifacts of a job readable on this rank, from the directory that rank 0 knows; collective."""


def share(communicator: Communicator, spec: JobSpec, folder: str, cache: Path | None = None) -> RankArtifacts:
    """Make a job's artifacts readable on this rank; collective.

    Args:
        communicator: All ranks.
        spec: The job, the same on every rank.
        folder: The server's artifact directory, which rank 0 can read.
        cache: Directory for received artifacts on a rank that cannot read ``folder``; default: the user's cache.
    """
    own, names = Path(folder), sorted(artifact_names(spec))
    found = _sizes(own, names) if os.access(own, os.R_OK | os.X_OK) else {}
    stated = communicator.broadcast(json.dumps(found).encode() if communicator.leads else None)
    readable = found == json.loads(stated)
    if all(communicator.gather(b"1" if readable else b"")):
        return RankArtifacts(own)
    cache = cache or default_cache()
    for name in names:
        data = communicator.broadcast((own / name).read_bytes() if communicator.leads else None)
        if not readable and not (cache / name).exists():
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(cache / name) as file:
                file.write(data)
    return RankArtifacts(own if readable else cache)


def _sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of those of the named files that are in a directory."""
    return {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
