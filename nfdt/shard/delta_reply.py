"""Weights as a difference to what a worker holds: the shard's record of that is the reply's error feedback.

A worker's backup is what the worker holds, bit for bit, whatever a codec lost on the way. The next difference is taken
to it, so that what was lost is sent then; and the update rule takes the drift from it, so that what was lost is part of
the delay that the rule compensates.
"""

from __future__ import annotations

import numpy as np

from nfdt.codecs import Codec
from nfdt.codecs.blocks import blocks, is_finite
from nfdt.shard.messages import Difference, Reply, Vector, Wish
from nfdt.shard.tensors import aligned_buffer

RESYNC_AFTER = 1000
"""Differences in a row; then all weights are sent once."""


class Chain:
    """The answers on one stream: its worker takes them in order, so it holds the last one when the next one comes.

    A new stream begins with all weights. What an old stream carried is not relied on: its last answers may be lost.
    """

    def __init__(self) -> None:
        self._last = 0
        self._differences = 0

    def wish(self, codec: Codec | None) -> Wish | None:
        """What may be wished for the next answer of a worker that takes differences in ``codec``, or none."""
        if codec is None or not self._last or self._differences >= RESYNC_AFTER:
            return None
        return Wish(codec, self._last)

    def answered(self, sequence: int, reply: Reply) -> None:
        """The request ``sequence`` gets this answer."""
        if reply.difference is not None:
            self._last, self._differences = sequence, self._differences + 1
        elif reply.weights is not None:
            self._last, self._differences = sequence, 0


def difference_to(held: Vector, weights: Vector, wish: Wish) -> tuple[Difference, Vector] | None:
    """What to send to a worker that holds ``held``, and what it will hold then.

    Args:
        held: Shape ``(n,)`` float32.
        weights: What it should hold, same shape.
        wish: Codec for the difference, and the answer that ``held`` comes from.

    Returns:
        None where the difference is not finite: all weights have to be sent.
    """
    codec, size = wish.codec, held.size
    payload, holds_then = np.empty(codec.encoded_bytes(size), np.uint8), aligned_buffer(size)
    for part, coded in blocks(codec, size):
        block = holds_then[part]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(weights[part], held[part], out=block)
        if not is_finite(block):
            return None
        payload[coded] = codec.encode(block)
        codec.decode(payload[coded], block)
        block += held[part]
    return Difference(codec, payload, wish.base), holds_then
