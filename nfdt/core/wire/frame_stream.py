"""Frames on a connection: the header's length (4 bytes, little-endian), the header, the raw payload.

A frame of kind PUSH, LOOKUP or WEIGHTS is followed by ``total_bytes`` of payload, unless the payload is ``shared``. It
is sent from and received into the caller's memory without a copy.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from google.protobuf.message import DecodeError

from nfdt.core.errors import ProtocolError
from nfdt.core.wire.connection import Connection
from nfdt.core.wire.shards_pb2 import LOOKUP, PUSH, WEIGHTS, Frame

MAX_HEADER_BYTES = 64 * 2**10
END_S = 10.0

_LENGTH = struct.Struct("<I")
_READ_AHEAD = 4096


def payload_bytes(header: Frame) -> int:
    """Return the number of bytes that follow a header."""
    return header.total_bytes if header.kind in (PUSH, LOOKUP, WEIGHTS) and not header.shared else 0


class FrameStream:
    """Sends and receives frames. One thread may send while another one receives.

    Attributes:
        sent: Number of bytes sent so far.
        received: Number of bytes received so far.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ahead = memoryview(bytearray(_READ_AHEAD))  # length and header of a frame arrive with one system call
        self._start = self._stop = 0
        self.sent = self.received = 0

    def send(self, header: Frame, payload: Any = b"") -> None:
        """Send one frame, or its beginning; :meth:`send_more` sends the rest.

        Args:
            header: Header, which contains the size of the payload.
            payload: Any object with a contiguous buffer.

        Raises:
            TimeoutError: the other side does not receive.
            OSError: the connection is gone.
        """
        data = header.SerializeToString()
        # One system call sends header and payload, without joining them.
        self.send_more(_LENGTH.pack(len(data)) + data, payload)

    def send_more(self, *pieces: Any) -> None:
        """Send the bytes of objects with contiguous buffers; raises the errors of :meth:`send`."""
        parts = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
        while parts:
            count = self._connection.send(parts)
            self.sent += count
            while parts and count >= parts[0].nbytes:
                count -= parts.pop(0).nbytes
            if count:
                parts[0] = parts[0][count:]

    def receive_header(self, *, patiently: bool = False) -> Frame | None:
        """Receive the next frame's header; None when the other side has closed the connection between two frames.

        Args:
            patiently: Wait for the first byte without a time limit; TCP keepalive detects a lost peer.

        Raises:
            TimeoutError: nothing arrived in time.
            EOFError: the connection ended inside the header.
            ProtocolError: the bytes are no header.
            OSError: the connection is gone.
        """
        while self._start == self._stop:
            try:
                count = self._receive(self._ahead)
            except TimeoutError:
                if not patiently:
                    raise
                continue
            if not count:
                return None
            self._start, self._stop = 0, count
        length = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))[0]
        if length > MAX_HEADER_BYTES:
            raise ProtocolError(f"Frame: expected a header of at most {MAX_HEADER_BYTES} bytes. Received: {length}.")
        try:
            return Frame.FromString(self.receive_bytes(length))
        except (DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"Frame: expected a header. Received something else: {error}") from None

    def receive_into(self, buffer: Any) -> None:
        """Fill ``buffer``, writable and contiguous, with the next bytes.

        Raises:
            TimeoutError: nothing arrived in time.
            EOFError: the connection ended before the buffer was full.
            OSError: the connection is gone.
        """
        if not memoryview(buffer).nbytes:
            return
        view = memoryview(buffer).cast("B")
        got = min(self._stop - self._start, view.nbytes)
        view[:got] = self._ahead[self._start : self._start + got]
        self._start += got
        while got < view.nbytes:
            count = self._receive(view[got:])
            if not count:
                raise EOFError(f"Frame: truncated, the connection ended after {got} of {view.nbytes} bytes.")
            got += count

    def receive_bytes(self, count: int) -> bytes:
        """Receive the next ``count`` bytes; raises the errors of :meth:`receive_into`."""
        data = bytearray(count)
        self.receive_into(data)
        return bytes(data)

    def end(self) -> None:
        """Stop sending, and wait up to ``END_S`` seconds until the other side has ended the connection too.

        Closing a connection with unread bytes resets it, and the data sent last may be lost.
        """
        self._connection.shut_down(socket.SHUT_WR)
        until = time.monotonic() + END_S
        try:
            while time.monotonic() < until and self._receive(self._ahead):
                pass
        except OSError:  # closed, or silent: the peer will not read any more
            return

    def stop_receiving(self) -> None:
        """End the receiving side, so that the receiving thread reads an end; answers in progress are still sent."""
        self._connection.shut_down(socket.SHUT_RD)

    def interrupt(self) -> None:
        """Wake the threads that wait for the connection, which has ended for them; any thread may call."""
        self._connection.shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection at once and wake threads that wait for it. Can be called twice."""
        self.interrupt()
        self._connection.close()

    def _receive(self, view: memoryview) -> int:
        count = self._connection.receive(view)
        self.received += count
        return count
