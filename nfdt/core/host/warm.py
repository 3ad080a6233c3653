"""Client side of the warm server: where it is, whether this process can use it, and requests to it.

The warm server is a process that has imported Keras and TensorFlow, and forks a job server with its slots for each run.
It listens on a Unix socket in a folder that only its owner may enter, and accepts processes of its owner only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nfdt.core.errors import UsageError
from nfdt.core.host.child_process import ForkedProcess
from nfdt.core.host.machine import versions

logger = logging.getLogger(__name__)

REQUEST_BYTES = 2**20
FORK_S = 10.0  # time for the warm server to answer
DESCRIPTORS = 4  # in a request: standard input, output and error, and the lock of the folder
_READ_AT_IMPORT = ("KERAS_", "TF_", "XLA_", "OMP_", "MKL_", "OPENBLAS_")  # prefixes of variables
_ANY = ("TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MAX_VLOG_LEVEL", "KERAS_BACKEND", "OPENBLAS_NUM_THREADS")  # except these
_MODULES = ("nfdt", "nfdt_client", "hfdt", "keras", "tensorflow", "numpy", "grpc", "pydantic")


@dataclass(frozen=True)
class WarmServer:
    """Description of a warm server, in a file that only its owner may write.

    Attributes:
        pid: Its process id.
        log: File with its messages.
        imported: What it has imported, see :func:`importable`.
    """

    pid: int
    log: str
    imported: Mapping[str, str]


def warm_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the warm server's files: in XDG_RUNTIME_DIR, else in the user's cache."""
    base = environ.get("XDG_RUNTIME_DIR") or environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "nfdt" / "warm"


def importable(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a process imports with this environment. It can use a warm server that has imported the same."""
    found = {f"version of {name}": version for name, version in versions().items()}
    found["environment of Python"] = sys.prefix
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        found[f"module {name}"] = str(spec.origin) if spec is not None else ""
    for name, value in sorted(environ.items()):
        if name.startswith(_READ_AT_IMPORT) and name not in _ANY:
            found[f"environment {name}"] = value
    config = Path(environ.get("KERAS_HOME") or Path("~/.keras").expanduser()) / "keras.json"
    with contextlib.suppress(OSError):
        found[str(config)] = hashlib.sha256(config.read_bytes()).hexdigest()[:12]
    return found


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return how the imports of a warm server differ from those that this process would make, as text."""
    names = [name for name in {**theirs, **ours} if theirs.get(name, "") != ours.get(name, "")]
    return [f"{name}: {theirs.get(name) or 'none'} there, {ours.get(name) or 'none'} here" for name in names]


def check_private(path: Path) -> None:
    """Check that a file or folder belongs to this user and that no other user may use it.

    Raises:
        UsageError: it does not, or others may.
        FileNotFoundError: there is none.
    """
    found = path.lstat()
    if found.st_uid != os.geteuid() or stat.S_ISLNK(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{path}: expected a file or folder of user {os.geteuid()} that no other user may read or write. Received: "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}. Remove it, then run `nfdt start` again."
        )


def read_warm_server(folder: Path) -> WarmServer | None:
    """Return the warm server that a file describes; it may have ended. None if there is no file.

    Raises:
        UsageError: the file is not this user's alone, or no description.
    """
    path = description_file(folder)
    try:
        path.lstat()
        check_private(folder)
        check_private(path)
        return WarmServer(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except UsageError:  # which is a ValueError
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: expected the description of a warm server. Received: {error}. Remove it.") from None


def describe(server: WarmServer) -> bytes:
    """Return the contents of the file that describes a warm server."""
    return json.dumps(asdict(server), indent=1).encode()


def description_file(folder: Path) -> Path:
    """Return the path of the description of this machine's warm server."""
    # Several machines may share a home.
    return folder / f"warm-{socket.gethostname()}.json"


@contextlib.contextmanager
def socket_name(folder: Path) -> Iterator[str]:
    """Yield a name of the warm server's socket that is valid in the block."""
    # The folder's own path may be too long for the address of a Unix socket (108 bytes).
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/warm-{socket.gethostname()[:64]}.sock"
    finally:
        os.close(descriptor)


def connect(folder: Path) -> socket.socket | None:
    """Connect to the warm server; None if it has ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket_name(folder) as name:
            connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def find_warm_server(folder: Path) -> WarmServer | None:
    """Return the warm server that this process can use; None, with the reason in the log, if there is none.

    The description of a server that was killed is removed.
    """
    try:
        server = read_warm_server(folder)
    except UsageError as error:
        logger.warning("The warm server is not used: %s", error)
        return None
    if server is None:
        return None
    if (connection := connect(folder)) is None:
        logger.warning(
            "The warm server (process %d) has ended without `nfdt stop`: a new server is started.", server.pid
        )
        description_file(folder).unlink(missing_ok=True)
        return None
    connection.close()
    if found := differences(server.imported, importable()):
        logger.warning("The warm server is not used, a new server is started. It differs: %s", "; ".join(found))
        return None
    return server


def start_warm(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str], *, output: int, log: int, lock: int
) -> ForkedProcess | None:
    """Request a job server with its own slots from the warm server; None if it has ended meanwhile.

    Args:
        folder: Folder of the warm server.
        arguments: Arguments of the job server.
        environment: Its environment; its working directory is that of this process.
        output: Descriptor of its standard output.
        log: Descriptor of its standard error.
        lock: Descriptor that it holds open until it ends.
    """
    if (connection := connect(folder)) is None:
        return None
    stdin, ours = os.pipe()
    process = ForkedProcess(connection, ours, "nfdt.jobserver.main")
    request: dict[str, Any] = {"arguments": [*arguments], "environment": {**environment}, "directory": os.getcwd()}
    try:
        socket.send_fds(connection, [json.dumps(request).encode()], [stdin, output, log, lock])
    except OSError as error:
        logger.info("The warm server takes no request: %s", error)
        connection.close()
        process.stdin.close()
        return None
    finally:
        os.close(stdin)
    if process.await_fork(FORK_S) is None:
        logger.warning("The warm server has not forked a job server, see its log: a new server is started.")
        process.kill()
        process.stdin.close()
        return None
    return process
