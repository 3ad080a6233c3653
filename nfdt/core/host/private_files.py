"""Files that only their owner may read, and private folders that are removed after their owner was killed.

The owners of a folder hold a lock on a file in it, which is released when the last of them ends, in whatever way.
Unlike a process id, the lock has the same meaning in every container that mounts the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nfdt.core.errors import UsageError

MODE = 0o600
LOCK = "nfdt-folder.lock"
PART = ".part"


def private(path: str, flags: int) -> int:
    """Open a file that only its owner may read; an ``opener`` for ``open``."""
    return os.open(path, flags | os.O_CLOEXEC, MODE)


def ensure_folder(path: Path, name: str) -> Path:
    """Make a private folder if it does not exist, and return it.

    Args:
        path: The folder.
        name: Its name in error messages, such as the option that sets it.

    Raises:
        UsageError: It cannot be made, or this process cannot write to it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(
            f"{name}: expected a directory that user {os.geteuid()} can make and write to. Received: {path} "
            f"({error.strerror}). Name another directory, or change the permissions of this one."
        ) from None
    return path


def make_folder(prefix: str, parent: Path | None = None) -> tuple[Path, int]:
    """Make a private folder for as long as the descriptor that is returned, or a copy of it, is open in any process.

    Args:
        prefix: Prefix of the folder's name.
        parent: Directory of the folder; the system's directory for temporary files by default.

    Returns:
        The folder, and the descriptor of its lock.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # removed by another sweep before its lock was held
            if (lock := _hold(folder / LOCK)) is not None:
                return folder, lock


def sweep(prefix: str, parent: Path | None = None) -> list[Path]:
    """Remove and return this user's folders of :func:`make_folder` whose owners were killed."""
    swept = []
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # locked by its owner, owned by another user, or removed meanwhile
            lock = _take_over(folder)
            try:
                shutil.rmtree(folder)
                swept.append(folder)
            finally:
                os.close(lock)
    return swept


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a private file that replaces ``target`` when the block succeeds and is removed otherwise.

    Such files of killed processes in the same folder are removed too.
    """
    for left in target.parent.glob(f"*{PART}"):
        with contextlib.suppress(OSError):  # locked by its writer, owned by another user, or removed meanwhile
            lock = _lock(left)
            left.unlink()
            os.close(lock)
    part, file = target, None
    while file is None:
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PART}")
        file = _hold(part)
    try:
        with os.fdopen(file, "wb") as writing:
            yield writing
            writing.flush()
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _hold(path: Path) -> int | None:
    """Make a file and lock it; None when another process removed it as abandoned before it was locked."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    with contextlib.suppress(OSError):  # a file system without locks: no other process can lock it either
        fcntl.flock(file, fcntl.LOCK_EX)
    if os.fstat(file).st_nlink:
        return file
    os.close(file)
    return None


def _take_over(folder: Path) -> int:
    """Lock a folder that has no owner any more and return the lock's descriptor.

    Raises:
        OSError: the folder has an owner, or is not a folder of this user.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is no folder of user {os.geteuid()}.")
    return _lock(folder / LOCK)


def _lock(path: Path) -> int:
    """Lock a file that no process has locked.

    Raises:
        OSError: another process has locked it, or it is not a file of this user.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no file of user {os.geteuid()}.")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """Make a folder with mode 0700 and remove it with its files when the block ends."""
    folder, lock = make_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file with mode 0600."""
    with open(path, "xb", opener=private) as file:
        file.write(content)
