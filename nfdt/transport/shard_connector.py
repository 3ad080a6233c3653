"""Connections to a shard: its service issues a ticket that admits a worker to the port of its streams."""

from __future__ import annotations

import ssl
from typing import Any

from nfdt.core.wire.channel import open_channel, split_address
from nfdt.core.wire.connection import client_tls, connect
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import OpenReply, OpenRequest

METHOD = "/nfdt.v1.Shard/Open"


class ShardConnector:
    """Connector that opens streams to one shard.

    Args:
        address: ``host:port`` of the shard's service.
        token: Token of the worker.
        timeout_s: Longest wait.
        **security: ``ca_file``, ``cert_file``, ``key_file`` of :func:`nfdt.core.wire.channel.open_channel`.
    """

    def __init__(self, address: str, token: str, timeout_s: float, **security: Any) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._channel = open_channel(address, token, **security)
        self._tls: ssl.SSLContext | None = None
        if security.get("ca_file"):
            self._tls = client_tls(security["ca_file"], security.get("cert_file"), security.get("key_file"))

    def open(self) -> FrameStream:
        """Open a new stream.

        Raises:
            grpc.RpcError: the shard did not issue a ticket.
            OSError: the port of its streams cannot be reached.
        """
        ask: Any = self._channel.unary_unary(METHOD, OpenRequest.SerializeToString, OpenReply.FromString)
        found: OpenReply = ask(OpenRequest(), timeout=self._timeout_s)
        host, _ = split_address(self.address)
        return FrameStream(connect(host, found.port, found.ticket, timeout_s=self._timeout_s, tls=self._tls))

    def close(self) -> None:
        """Close the channel to the service; open streams stay open."""
        self._channel.close()
