"""Artifacts: files on the server, named by the sha256 of their content, and either complete or absent."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nfdt.core.errors import NfdtError, NotStored, PolicyRefused, ProtocolError, UsageError
from nfdt.core.host.private_files import private

_log = logging.getLogger(__name__)

CHUNK_BYTES = 2 * 2**20
MAX_RANGES = 65536
MAX_RANGE_BYTES = 256 * 2**20
UPLOAD_WAIT_S = 600.0
EVICT_AFTER_S = 3600.0
ORPHAN_S = 24 * 3600.0  # time in which a job must name an uploaded file
EXPIRE_EVERY_S = 3600.0
FILE_BYTES = 16 * 2**10  # that a file counts at least for its owner: the disk has as many files
_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL = ".partial"

Data = bytes | memoryview


def check_name(sha256: str) -> str:
    """Return a valid name, or raise UsageError."""
    # Names come over the network and become file names.
    if not _NAME.fullmatch(sha256):
        raise UsageError(f"Artifact name: expected 64 hexadecimal digits. Received: {sha256[:80]!r}.")
    return sha256


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, so that a loss of power does not undo a renaming."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class NewArtifact:
    """File that is being written: its descriptor, and its name once it is complete."""

    file: int
    name: str = ""


def _hash_of(new: NewArtifact) -> str:
    with open(new.file, "rb", closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


class ArtifactStore:
    """A directory of artifacts; every method may be called from any thread.

    Args:
        root: The directory, made with mode 0700.
        quota_bytes: Size limit of all artifacts together.
        max_artifact_bytes: Size limit of one artifact.
        in_use: Returns the names that must not be evicted; called only for an eviction.
        lasting: Whether artifacts outlive a loss of power; it takes the disk's time.
        now: Returns the Unix time in seconds.
    """

    def __init__(
        self,
        root: Path,
        *,
        quota_bytes: int = 2**40,
        max_artifact_bytes: int = 2**38,
        in_use: Callable[[], set[str]] = set,
        lasting: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root = root
        self._quota, self._largest = quota_bytes, max_artifact_bytes
        self._in_use, self._lasting, self._now = in_use, lasting, now
        self._writing: set[str] = set()  # by the names of their partial files, without the suffix
        self._orphans: dict[str, dict[str, int]] = {}  # by owner, the sizes of uploads that no job names yet
        self._expire_at = -math.inf
        self._idle = threading.Condition()
        self._used = sum(f.stat().st_size for f in root.iterdir())

    def room(self) -> int:
        """Return the bytes that may still be stored: the room on the disk, or less by the quota.

        Files that no job needs do not count towards the quota, as they make room.
        """
        kept = [self.root / name for name in self._in_use()]
        used = sum(file.stat().st_size for file in kept if file.is_file())
        return max(0, min(shutil.disk_usage(self.root).free, self._quota - used))

    def path(self, sha256: str) -> Path:
        """Return the file of a complete artifact.

        Raises:
            UsageError: the artifact is not here, or the name is invalid.
        """
        path = self.root / check_name(sha256)
        if not path.is_file():
            raise UsageError(f"Artifact {sha256} is not on this server. Upload it first.")
        return path

    def has(self, sha256: str) -> bool:
        """Return whether the artifact is here, complete."""
        return (self.root / check_name(sha256)).is_file()

    def renew(self, sha256: str) -> bool:
        """Return whether the artifact is here, complete; a job that names it is awaited from now on."""
        found = self.has(sha256)
        if found:
            with contextlib.suppress(FileNotFoundError):  # removed in this moment
                os.utime(self.root / sha256)
        return found

    def have_bytes(self, sha256: str, owner: str = "") -> int:
        """Return the number of bytes of an owner's incomplete artifact: the offset at which its upload may resume."""
        partial = self._partial(sha256, owner)
        return partial.stat().st_size if partial.exists() else 0

    def _partial(self, sha256: str, owner: str) -> Path:
        """Return the file of an upload: each owner has one, as nobody's bytes are verified before the end."""
        infix = f".{hashlib.sha256(owner.encode()).hexdigest()[:16]}" if owner else ""
        return self.root / f"{check_name(sha256)}{infix}{_PARTIAL}"

    def claim(self, names: Iterable[str]) -> None:
        """Count the artifacts that a job names as orphans no more."""
        with self._idle:
            for name in names:
                self._forget(name)

    def _forget(self, sha256: str) -> None:
        for held in self._orphans.values():
            held.pop(sha256, None)

    def expire(self, named: Callable[[], set[str]]) -> None:
        """Remove files that no job names and that are older than a day; look for them once an hour at most.

        ``named`` returns the names of the artifacts of all jobs.
        """
        with self._idle:
            if self._now() < self._expire_at:
                return
            self._expire_at = self._now() + EXPIRE_EVERY_S
        keep = named()
        with self._idle:
            for file in self._unneeded(keep, ORPHAN_S):
                self._remove(file, "has expired")

    def put(self, *parts: Data) -> str:
        """Store the concatenated bytes of all parts and return their name."""
        digest, sizes = hashlib.sha256(), [0]
        for part in parts:
            digest.update(part)
            sizes.append(len(part))
        sha256 = digest.hexdigest()
        self.receive(sha256, sum(sizes), 0, zip(itertools.accumulate(sizes), parts, strict=False))
        return sha256

    @contextmanager
    def create(self, *sizes: int) -> Iterator[list[NewArtifact]]:
        """Yield files of these sizes in bytes, to write at any position; they have their names after the block.

        Raises:
            PolicyRefused: one is too large, or does not fit into the quota.
            NotStored: the disk is full.
        """
        with contextlib.ExitStack() as stack:
            new = [stack.enter_context(self._create(size)) for size in sizes]
            yield new
            with ThreadPoolExecutor(len(new)) as pool:  # hashing takes longer than writing
                for each, name in zip(new, pool.map(_hash_of, new), strict=True):
                    each.name = name

    @contextmanager
    def _create(self, size: int) -> Iterator[NewArtifact]:
        self._check_size("of a job's state", size)
        self._make_room(size)
        partial = self.root / f"{secrets.token_hex(32)}{_PARTIAL}"
        try:
            with self._storing("of a job's state", size), open(partial, "w+b", opener=private) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk is noticed when the file is read
                new = NewArtifact(file.fileno())
                yield new
                self._finish(file.fileno(), partial, new.name)
        finally:
            partial.unlink(missing_ok=True)

    def receive(
        self,
        sha256: str,
        total_bytes: int,
        offset: int,
        chunks: Iterable[tuple[int, Data]],
        owner: str = "",
        *,
        limited: bool = False,
    ) -> int:
        """Write an artifact from (offset, data) chunks that begin at ``offset`` and follow in order.

        Received bytes are kept when the chunks break off: the same owner's upload can resume there.

        Args:
            sha256: Name of the artifact.
            total_bytes: Its size.
            offset: Number of bytes that are here.
            chunks: The others.
            owner: Who uploads it; "": the server itself.
            limited: Whether the owner's uploads that no job names yet may take half of the free room at most.

        Returns:
            The artifact's size in bytes.

        Raises:
            PolicyRefused: the artifact is too large, or does not fit into the quota or the owner's part of the room.
            ProtocolError: the chunks are out of order or exceed ``total_bytes``, or their hash is not the name.
            NotStored: the disk is full; received bytes are deleted.
        """
        self._check_size(sha256, total_bytes)
        partial = self._partial(sha256, owner)
        self._acquire(partial)
        try:
            if not self.has(sha256):
                if limited:
                    self._count_orphan(sha256, total_bytes, owner)
                self._write(sha256, partial, total_bytes, offset, chunks)
            return self.path(sha256).stat().st_size
        finally:
            with self._idle:
                self._writing.discard(partial.name)
                self._idle.notify_all()

    def _count_orphan(self, sha256: str, size: int, owner: str) -> None:
        """Count an upload for its owner until a job names it.

        Raises:
            PolicyRefused: The owner has too many such bytes.
        """
        free = min(shutil.disk_usage(self.root).free, self._quota - self._used)
        with self._idle:
            held = self._orphans.setdefault(owner, {})
            others = sum(held.values()) - held.get(sha256, 0)
            size = max(size, FILE_BYTES)
            if 2 * (others + size) > free:  # whether or not the others are on the disk by now
                raise PolicyRefused(
                    f"Artifact {sha256}: expected uploads that no job names yet to take at most half of the free room, "
                    f"{free // 2} bytes. Received: {others} bytes, and {size} more. Submit their job, or "
                    f"wait: after {ORPHAN_S / 3600:.0f} hours they are removed."
                )
            held[sha256] = size

    def _check_size(self, what: str, size: int) -> None:
        if not 0 <= size <= self._largest:
            raise PolicyRefused(f"Artifact {what}: expected at most {self._largest} bytes. Received: {size}.")

    @contextmanager
    def _storing(self, what: str, size: int) -> Iterator[None]:
        """Raise NotStored in place of an error of the file system."""
        try:
            yield
        except NfdtError:  # Refused is a PermissionError, and so an OSError
            raise
        except OSError as error:
            raise NotStored(
                f"Artifact {what} cannot be written to {self.root}: {error.strerror or error}. Expected: room for "
                f"{size} bytes on the disk, and the right to write. Make room, for example with nfdt jobs delete."
            ) from error

    def _finish(self, file: int, partial: Path, sha256: str) -> None:
        """Give a complete file its name: once its bytes are on the disk, even after a loss of power, where it lasts."""
        if self._lasting:
            os.fsync(file)
        size = os.fstat(file).st_size
        with self._idle:
            if not self.has(sha256):  # another owner's upload may have been faster
                self._used += size
            partial.replace(self.root / sha256)
        if self._lasting:
            sync_folder(self.root)

    def _acquire(self, partial: Path) -> None:
        """Wait for another writer of this file, then become its only writer."""
        with self._idle:
            if not self._idle.wait_for(lambda: partial.name not in self._writing, UPLOAD_WAIT_S):
                raise PolicyRefused(f"Artifact {partial.name[:64]} is being uploaded already. Try again later.")
            self._writing.add(partial.name)

    def _write(self, sha256: str, partial: Path, total: int, offset: int, chunks: Iterable[tuple[int, Data]]) -> None:
        before = partial.stat().st_size if partial.exists() else 0
        have = before if offset else 0
        if offset != have:
            raise ProtocolError(f"Artifact {sha256}: expected to resume at byte {have}. Received: byte {offset}.")
        self._make_room(total - have)
        digest = hashlib.sha256()
        if offset:  # the hash covers what arrived with earlier uploads too
            with partial.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        try:
            with self._storing(sha256, total):
                self._fill(sha256, partial, digest, total, offset, chunks)
        except NotStored:
            partial.unlink(missing_ok=True)
            raise
        finally:
            with self._idle:
                self._used += (partial.stat().st_size if partial.exists() else 0) - before
                if not (partial.exists() or self.has(sha256)):
                    self._forget(sha256)

    def _fill(
        self,
        sha256: str,
        partial: Path,
        digest: hashlib._Hash,
        total: int,
        at: int,
        chunks: Iterable[tuple[int, Data]],
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if at else os.O_TRUNC)
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            for offset, data in chunks:
                if offset != at or at + len(data) > total:
                    raise ProtocolError(
                        f"Artifact chunk: expected byte {at} of {total}. Received: {len(data)} bytes at {offset}."
                    )
                file.write(data)
                digest.update(data)
                at += len(data)
            if at != total:
                raise ProtocolError(f"Artifact: expected {total} bytes. Received: {at}. Resume the upload.")
            file.flush()
            if digest.hexdigest() != sha256:
                partial.unlink()
                raise ProtocolError(f"Artifact {sha256}: the content has the hash {digest.hexdigest()}. Upload again.")
            self._finish(file.fileno(), partial, sha256)

    def _make_room(self, wanted: int) -> None:
        with self._idle:
            if self._used + wanted > self._quota:
                self._evict(self._used + wanted - self._quota)
            if self._used + wanted > self._quota:
                raise PolicyRefused(
                    f"The server's artifacts take {self._used} of {self._quota} bytes; {wanted} more do not fit. "
                    "Remove old jobs' state from its state directory, or raise its quota."
                )

    def _evict(self, wanted: int) -> None:
        """Delete files that no job needs, oldest first, until ``wanted`` bytes are free."""
        # A client uploads its files before it submits its job: recent files are kept although no job names them yet.
        for file in self._unneeded(self._in_use(), EVICT_AFTER_S):
            if wanted <= 0:
                return
            wanted -= self._remove(file, "makes room")

    def _unneeded(self, keep: set[str], age_s: float) -> list[Path]:
        """Return files that nobody writes, whose names are not to be kept, and that are older; the oldest first."""
        files = sorted((file.stat().st_mtime, file) for file in self.root.iterdir())
        old = [file for mtime, file in files if mtime <= self._now() - age_s]
        return [file for file in old if file.name[:64] not in keep and file.name not in self._writing]

    def _remove(self, file: Path, why: str) -> int:
        """Remove a file; return its size in bytes."""
        size = file.stat().st_size
        _log.info("artifact %s (%d bytes) %s", file.name, size, why)
        file.unlink()
        self._used -= size
        self._forget(file.name[:64])
        return size

    def intact(self, sha256: str) -> bool:
        """Return whether the artifact is here and its content has its hash."""
        if not self.has(sha256):
            return False
        with self.path(sha256).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256

    def delete(self, sha256: str) -> int:
        """Delete an artifact if it is here; return its size in bytes."""
        with self._idle:
            path = self.root / check_name(sha256)
            size = path.stat().st_size if path.exists() else 0
            path.unlink(missing_ok=True)
            self._used -= size
            self._forget(sha256)
            return size

    def read(self, sha256: str) -> bytes:
        """Return the bytes of the whole artifact."""
        return self.path(sha256).read_bytes()

    def chunks(self, sha256: str, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """Yield (offset, total bytes, data) from ``offset`` on; one empty chunk if no bytes are left."""
        path = self.path(sha256)
        total = path.stat().st_size
        if offset > total:
            raise UsageError(f"Artifact {sha256} has {total} bytes. Received: offset {offset}.")
        with path.open("rb") as file:
            file.seek(offset)
            if offset == total:
                yield offset, total, b""
            while data := file.read(CHUNK_BYTES):
                yield offset, total, data
                offset += len(data)

    def ranges(self, sha256: str, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bytes]]:
        """Yield (offset in the sequence, total bytes, data) of some (offset, length) ranges, one after the other.

        Raises:
            UsageError: more or longer ranges than one call may ask for, or one beyond the end of the artifact.
        """
        path = self.path(sha256)
        total, asked = path.stat().st_size, sum(length for _, length in wanted)
        if len(wanted) > MAX_RANGES or asked > MAX_RANGE_BYTES:
            raise UsageError(
                f"Artifact {sha256}: expected at most {MAX_RANGES} ranges of {MAX_RANGE_BYTES} bytes together. "
                f"Received: {len(wanted)} of {asked} bytes."
            )
        if beyond := next((one for one in wanted if one[0] + one[1] > total), None):
            raise UsageError(f"Artifact {sha256} has {total} bytes. Received: {beyond[1]} bytes from {beyond[0]} on.")
        sent, buffer = 0, bytearray()
        with path.open("rb") as file:
            for offset, length in wanted:
                for at in range(offset, offset + length, CHUNK_BYTES):
                    buffer += os.pread(file.fileno(), min(CHUNK_BYTES, offset + length - at), at)
                    if len(buffer) >= CHUNK_BYTES:
                        yield sent, total, bytes(buffer)
                        sent, buffer = sent + len(buffer), bytearray()
        if buffer or not sent:
            yield sent, total, bytes(buffer)
