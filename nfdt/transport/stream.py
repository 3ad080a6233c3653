"""Shards behind gRPC: one bidirectional stream per shard, all shards at the same time.

With a shard on the same machine the stream carries headers only; see :mod:`nfdt.transport.shared_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays import ParameterLayout
from nfdt.core.wire.channel import DATA_BYTES, open_channel, split_address
from nfdt.core.wire.shards_pb2 import PULL, PUSH, Frame
from nfdt.transport.base import Pulled, Pushed, Vector, check_gradient, shard_bounds
from nfdt.transport.link import Answer, Request, ShardLink
from nfdt.transport.shared_memory import is_this_machine

TIMEOUT_S = 120.0


class StreamClient:
    """A ``ParameterClient`` over gRPC.

    Args:
        addresses: ``host:port`` of each shard, in order.
        layout: Of the whole model.
        worker: This worker's name, unique among the workers that live.
        token: The job's token.
        timeout_s: Longest wait for one answer.
        share_memory: Exchange gradients and weights through memory with the shards of this machine that agree.
        **security: ``ca_file``, ``cert_file``, ``key_file`` of :func:`nfdt.core.wire.channel.open_channel`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        layout: ParameterLayout,
        worker: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        share_memory: bool = True,
        **security: Any,
    ) -> None:
        self._bounds = shard_bounds(layout, len(addresses))
        self._size = layout.size
        self._worker = worker
        self._sequence = 0
        self._links = [
            ShardLink(
                address,
                open_channel(address, token, max_message_bytes=DATA_BYTES, **security),
                timeout_s,
                share_memory=share_memory and is_this_machine(split_address(address)[0]),
            )
            for address in addresses
        ]

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all shards, in frames and through shared memory."""
        return sum(link.bytes_moved[0] for link in self._links)

    @property
    def bytes_received(self) -> int:
        """Bytes received from all shards, in frames and through shared memory."""
        return sum(link.bytes_moved[1] for link in self._links)

    def pull(self, min_version: int = 0) -> Pulled:
        """See ``ParameterClient``.

        Raises:
            ServerUnreachable: a shard is gone or silent; the message names its address.
        """
        header = Frame(kind=PULL, version=min_version)
        weights, answers = self._exchange(header, np.empty(0, np.float32))
        return Pulled(weights, tuple(answer.header.version for answer in answers))

    def push(
        self,
        gradient: Vector,
        *,
        samples: int,
        round: int = 0,
        part: int = 0,
        parts: int = 1,
        want_weights: bool = True,
    ) -> Pushed:
        """See ``ParameterClient``; also applied at most once when a stream breaks and the push is sent again.

        Raises:
            ServerUnreachable: a shard is gone or silent; the message names its address.
            ShapeMismatch: the gradient has another size.
        """
        check_gradient(gradient, self._bounds)
        header = Frame(kind=PUSH, samples=samples, round=round, part=part, parts=parts, want_weights=want_weights)
        weights, answers = self._exchange(header, np.ascontiguousarray(gradient))
        headers = [answer.header for answer in answers]
        return Pushed(
            weights if all(answer.weights for answer in answers) else None,
            tuple(h.version for h in headers),
            max(h.staleness for h in headers),
            all(h.applied for h in headers),
        )

    def close(self) -> None:
        """Disconnect from all shards."""
        for link in self._links:
            link.close()

    def _exchange(self, header: Frame, gradient: Vector) -> tuple[Vector, list[Answer]]:
        self._sequence += 1
        header.sequence, header.worker = self._sequence, self._worker
        weights = np.empty(self._size, np.float32)
        for link, bound in zip(self._links, self._bounds, strict=True):
            link.ask(Request(header, _bytes(gradient[bound]), _bytes(weights[bound])))
        answers = [link.wait() for link in self._links]
        if len(answers) == 1 and answers[0].shared is not None:
            return answers[0].shared, answers
        for answer, bound in zip(answers, self._bounds, strict=True):
            if answer.shared is not None:
                np.copyto(weights[bound], answer.shared)
        return weights, answers


def _bytes(vector: Vector) -> memoryview:
    return vector.data.cast("B") if vector.size else memoryview(bytearray())
