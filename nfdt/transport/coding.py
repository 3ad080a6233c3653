"""The worker's side of codecs: encodes gradients with error feedback, and decodes deltas of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nfdt.codecs import IDENTITY, Codec, ErrorFeedback
from nfdt.codecs.base import Payload, Vector
from nfdt.codecs.fused import decode_and_add, is_finite
from nfdt.core.errors import ProtocolError
from nfdt.transport.choice import CodecChoice


@dataclass(frozen=True)
class EncodedGradient:
    """Gradient as it is sent: one payload per shard, shape ``(n,)`` uint8, valid until the reply arrives."""

    codec: Codec
    payloads: list[Payload]


@dataclass(frozen=True)
class AnswerPart:
    """One shard's part of a reply: weights, or a delta to those of reply ``base``."""

    weights: Vector | None = None
    delta: Payload | None = None
    codec: Codec = IDENTITY
    base: int = 0


class Coding:
    """Encoder of one worker's pushes and decoder of the replies, in their order.

    The error of a push is kept here and sent with later pushes, also across epochs. The error left when the worker
    leaves is never sent; :meth:`report` returns its size.

    Args:
        choice: Choice of the codecs.
        bounds: Range of each shard's elements.
    """

    def __init__(self, choice: CodecChoice, bounds: Sequence[slice]) -> None:
        self._choice, self._bounds = choice, bounds
        self._feedback = ErrorFeedback(bounds[-1].stop)
        self._sent: EncodedGradient | None = None
        self._base: Vector | None = None
        self._base_answer = 0
        self._uses: dict[str, dict[str, dict[str, int]]] = {"push": {}, "reply": {}}

    @property
    def reply_codec(self) -> Codec | None:
        """Codec of the deltas to request; None for all weights."""
        codec = self._choice.reply
        return None if codec is IDENTITY else codec

    def encode(self, gradient: Vector, compute_s: float = 0.0) -> EncodedGradient:
        """Encode, for each shard, the sum of a gradient, shape ``(P,)``, and the residual of earlier pushes.

        A non-finite sum is sent as NaN to every shard, so that all of them drop it; the residual stays.
        """
        payloads = None
        if finite := is_finite(gradient):
            self._choice.pushes(gradient, self._feedback.residual, compute_s)
        codec = self._choice.push
        if finite:
            payloads = self._feedback.encode(codec, gradient, self._bounds)
        if payloads is None:
            lost = np.full(gradient.size, np.nan, np.float32)
            payloads = [codec.encode(lost[bound]) for bound in self._bounds]
        self._sent = EncodedGradient(codec, payloads)
        self._note("push", codec, sum(payload.nbytes for payload in payloads))
        return self._sent

    def decode(self, sequence: int, parts: Sequence[AnswerPart], out: Vector) -> Vector:
        """Assemble the weights of reply ``sequence`` in ``out``, which may already hold parts (``AnswerPart()``).

        Args:
            sequence: Number of the reply; replies arrive in order.
            parts: Parts of the reply, one per shard.
            out: Shape ``(P,)``; the client must not change it until the next reply is decoded into another vector.

        Raises:
            ProtocolError: a delta is not based on the weights of the last reply.
        """
        size = 0
        for part, bound in zip(parts, self._bounds, strict=True):
            if part.delta is not None:
                self._add(part, bound, out)
                size += part.delta.nbytes
                continue
            if part.weights is not None:
                np.copyto(out[bound], part.weights)
            size += out[bound].nbytes
        if self._base is not None:
            self._choice.received(self._base, out)
        self._base, self._base_answer = out, sequence
        self._note("reply", parts[0].codec, size)
        return out

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Record the time of an exchange, without the time that the shards took to serve it."""
        self._choice.exchanged(sent_bytes, received_bytes, seconds)

    def report(self) -> dict[str, Any]:
        """Return messages and bytes by direction and codec, the residual relative to the last push, and decisions."""
        residual, sent = float(np.linalg.norm(self._feedback.residual)), self._norm_sent()
        return {
            **self._uses,
            "residual": round(residual / sent, 6) if sent else 0.0,
            "decisions": self._choice.decisions(),
        }

    def _add(self, part: AnswerPart, bound: slice, out: Vector) -> None:
        if self._base is None or part.base != self._base_answer or part.delta is None:
            raise ProtocolError(
                f"Answer: expected all weights, or a difference to those of answer {self._base_answer}. Received: a "
                f"difference to answer {part.base}."
            )
        decode_and_add(part.codec, part.delta, self._base[bound], out[bound])

    def _norm_sent(self) -> float:
        """Return the norm of the last push as the shards decoded it."""
        if self._sent is None:
            return 0.0
        decoded = np.empty(self._bounds[-1].stop, np.float32)
        for payload, bound in zip(self._sent.payloads, self._bounds, strict=True):
            self._sent.codec.decode(payload, decoded[bound])
        return float(np.linalg.norm(decoded))

    def _note(self, direction: str, codec: Codec, size: int) -> None:
        use = self._uses[direction].setdefault(codec.name, {"messages": 0, "bytes": 0})
        use["messages"] += 1
        use["bytes"] += size
