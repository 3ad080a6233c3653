"""Stream to a shard without a client: arbitrary bytes are sent, all answers are returned."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from nfdt.core.wire.channel import open_channel, split_address
from nfdt.core.wire.connection import connect
from nfdt.core.wire.frame_stream import FrameStream, payload_bytes
from nfdt.core.wire.shards_pb2 import Frame, OpenReply, OpenRequest
from nfdt.transport.link import METHOD


def encode(header: Frame, payload: bytes = b"") -> bytes:
    """Return one frame as it is sent."""
    data = header.SerializeToString()
    return len(data).to_bytes(4, "little") + data + payload


def ticket(address: str, token: str) -> OpenReply:
    with open_channel(address, token) as channel:
        call = channel.unary_unary(METHOD, OpenRequest.SerializeToString, OpenReply.FromString)
        return call(OpenRequest(), timeout=20)


def exchange(address: str, token: str, messages: Iterable[bytes]) -> list[Frame]:
    """Send all messages, end sending, and return all answers; an error that ends the stream early is raised."""
    found = ticket(address, token)
    connection = connect(split_address(address)[0], found.port, found.ticket, timeout_s=30)
    stream, answers = FrameStream(connection), []
    try:
        rest = memoryview(b"".join(messages))
        while rest:
            rest = rest[connection.send([rest]) :]
        connection.shut_down(socket.SHUT_WR)
        while (header := stream.receive_header()) is not None:
            stream.receive_bytes(payload_bytes(header))
            answers.append(header)
        return answers
    finally:
        stream.close()
