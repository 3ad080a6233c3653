"""Open files that a process hands to others of its user on the same machine, over a Unix socket without a file."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Sequence

from nfdt.core.errors import Refused

PREFIX = "nfdt-"
FETCH_S = 5.0
END_S = 1.0  # longest wait for the end of a thread
MOST_FILES = 16

_NAME = re.compile(PREFIX + r"[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class PassedFiles:
    """Socket that hands out files until it is withdrawn; the files themselves may be closed meanwhile.

    Args:
        files: Descriptors, at most ``MOST_FILES``.

    Attributes:
        name: Name of the socket, which nobody can guess.

    Raises:
        OSError: there is no socket of this kind, or no room for it.
        RuntimeError: no thread can be started.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self.name = PREFIX + secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._files = [os.dup(file) for file in files]
        try:
            self._socket.bind(_address(self.name))
            self._socket.listen()
            self._thread = threading.Thread(target=self._hand_out, name="files", daemon=True)
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def withdraw(self) -> None:
        """Stop handing out the files; can be called twice."""
        with contextlib.suppress(OSError):  # not listening any more
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait in accept
        self._thread.join(END_S)

    def _hand_out(self) -> None:
        """Send the files to every process of this user that connects; only one is told the name."""
        try:
            with contextlib.suppress(OSError):  # withdrawn
                while True:
                    peer, _ = self._socket.accept()
                    with peer, contextlib.suppress(OSError):  # the peer has disconnected
                        if _user_of(peer) == os.geteuid():
                            socket.send_fds(peer, [b"."], self._files)
        finally:
            self._close()

    def _close(self) -> None:
        self._socket.close()
        for file in self._files:
            os.close(file)


def fetch_files(name: str) -> list[int]:
    """Return the descriptors of files that a process of this user on this machine hands out; the caller closes them.

    Raises:
        Refused: nobody does under this name, which comes from the network.
    """
    if not _NAME.fullmatch(name):
        raise Refused(f"Files: expected a name like {PREFIX}<32 hex digits>. Received: {name[:80]!r}.")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(FETCH_S)
            peer.connect(_address(name))
            if (user := _user_of(peer)) != os.geteuid():
                raise Refused(f"Files: expected one of user {os.geteuid()}. Received: one of user {user}.")
            _, files, _, _ = socket.recv_fds(peer, 1, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    except Refused:
        raise
    except OSError as error:
        raise Refused(f"Files: expected one that a process of this machine hands out. Received: {error}.") from None
    if not files:
        raise Refused("Files: expected a file. Received: none.")
    return list(files)


def _address(name: str) -> str:
    """Return the abstract address (leading zero byte) of the Unix socket: no file; it ends with its process."""
    return f"\0{name}"


def _user_of(peer: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel reports it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
