"""Weights as a delta to a worker's backup: the backup is the error feedback of the replies.

A worker's backup equals the weights that the worker holds, bit for bit, after the losses of a codec. The next delta is
relative to the backup, so it also carries earlier losses. The update rule measures the drift from the backup, so losses
are part of the delay that the rule compensates.
"""

from __future__ import annotations

import numpy as np

from nfdt.codecs import Codec
from nfdt.codecs.fused import encode_difference
from nfdt.shard.buffers import aligned_buffer
from nfdt.shard.messages import DeltaRequest, Reply, Vector, WeightDelta

RESYNC_AFTER = 1000
"""Number of deltas in a row after which all weights are sent once."""


class ReplyHistory:
    """Replies on one stream. The worker receives them in order, so the base of the next delta is the last reply.

    A new stream begins with all weights. Replies on an old stream do not count: the last of them may be lost.
    """

    def __init__(self) -> None:
        self._last = 0
        self._deltas = 0

    def delta_request(self, codec: Codec | None) -> DeltaRequest | None:
        """Return the request for a delta in ``codec`` as the next reply; None for all weights."""
        if codec is None or not self._last or self._deltas >= RESYNC_AFTER:
            return None
        return DeltaRequest(codec, self._last)

    def add(self, sequence: int, reply: Reply) -> None:
        """Record the reply to the request ``sequence``."""
        if reply.delta is not None:
            self._last, self._deltas = sequence, self._deltas + 1
        elif reply.weights is not None:
            self._last, self._deltas = sequence, 0


def encode_delta(base: Vector, weights: Vector, request: DeltaRequest) -> tuple[WeightDelta, Vector] | None:
    """Encode the difference of two vectors, and compute the sum of the first one and the decoded difference.

    Args:
        base: Weights that the worker holds, shape ``(n,)`` float32.
        weights: Weights that it should hold, same shape.
        request: Codec of the delta, and the number of the reply that ``base`` comes from.

    Returns:
        The delta and the weights that the worker will hold; None if the difference is not finite and all weights must
        be sent.
    """
    codec, size = request.codec, base.size
    payload, reached = np.empty(codec.encoded_bytes(size), np.uint8), aligned_buffer(size)
    if not encode_difference(codec, base, weights, payload, reached):
        return None
    return WeightDelta(codec, payload, request.base), reached
