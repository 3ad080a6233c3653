"""Files that only their owner may read, and folders of theirs that are removed when their owner was killed.

A folder's owners hold a lock on a file in it. The lock ends with the last process that holds it, whatever ends that
process, and is seen from every container that sees the folder: a process id would not tell who lives in another one.
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

MODE = 0o600
LOCK = "nfdt-folder.lock"
PART = ".part"


def private(path: str, flags: int) -> int:
    """Opener, as for ``open``, of files that only their owner may read."""
    return os.open(path, flags | os.O_CLOEXEC, MODE)


def make_folder(prefix: str, parent: Path | None = None) -> tuple[Path, int]:
    """Make a private folder for as long as the descriptor that is returned, or a copy of it, is open in any process.

    Args:
        prefix: Of its name.
        parent: Where; the system's directory for temporary files unless given.

    Returns:
        The folder, and the descriptor of its lock.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # swept away before its lock was held
            if (lock := _hold(folder / LOCK)) is not None:
                return folder, lock


def sweep(prefix: str, parent: Path | None = None) -> list[Path]:
    """Remove the folders of :func:`make_folder` whose owners were killed; this user's only. Returns them."""
    swept = []
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it has an owner, or none of this user, or is gone by now
            lock = _take_over(folder)
            try:
                shutil.rmtree(folder)
                swept.append(folder)
            finally:
                os.close(lock)
    return swept


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A private file that takes the place of ``target`` once the block has ended well, and is removed otherwise.

    What killed processes left of such files in the folder is removed too.
    """
    for left in target.parent.glob(f"*{PART}"):
        with contextlib.suppress(OSError):  # it has a writer, or none of this user, or is gone by now
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
    """Make a file and lock it; None when it was taken for a left one before it was locked."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    with contextlib.suppress(OSError):  # a file system without locks: then no other process gets one either
        fcntl.flock(file, fcntl.LOCK_EX)
    if os.fstat(file).st_nlink:
        return file
    os.close(file)
    return None


def _take_over(folder: Path) -> int:
    """The lock of a folder that has no owner any more.

    Raises:
        OSError: it has one, or is no such folder.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is no folder of user {os.geteuid()}.")
    return _lock(folder / LOCK)


def _lock(path: Path) -> int:
    """Lock a file that no process holds.

    Raises:
        OSError: another process holds it, or it is no file of this user.
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
