"""A worker's side of codecs: gradients become bytes, with error feedback; differences become weights again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nfdt.codecs import IDENTITY, Codec, ErrorFeedback
from nfdt.codecs.base import Payload, Vector
from nfdt.codecs.blocks import blocks, is_finite
from nfdt.core.errors import ProtocolError
from nfdt.transport.choice import Choice


@dataclass(frozen=True)
class Encoded:
    """A gradient as it is sent: one payload per shard, shape ``(n,)`` uint8, good until the answer is there."""

    codec: Codec
    payloads: list[Payload]


@dataclass(frozen=True)
class Part:
    """One shard's part of an answer: weights, or a difference to those of answer ``base``."""

    weights: Vector | None = None
    difference: Payload | None = None
    codec: Codec = IDENTITY
    base: int = 0


class Coding:
    """Encodes one worker's pushes and decodes the answers, in their order.

    What a push loses is kept here and goes out with later pushes. It stays from one epoch to the next; what is left
    when the worker leaves has not been sent, and :meth:`report` says how much that is.

    Args:
        choice: Of the codecs.
        bounds: Where each shard's elements lie.
    """

    def __init__(self, choice: Choice, bounds: Sequence[slice]) -> None:
        self._choice, self._bounds = choice, bounds
        self._feedback = ErrorFeedback(bounds[-1].stop)
        self._sent: Encoded | None = None
        self._held: Vector | None = None
        self._held_answer = 0
        self._uses: dict[str, dict[str, dict[str, int]]] = {"push": {}, "reply": {}}

    @property
    def reply_codec(self) -> Codec | None:
        """Codec in which differences are welcome; None for all weights."""
        codec = self._choice.reply
        return None if codec is IDENTITY else codec

    def encode(self, gradient: Vector, compute_s: float = 0.0) -> Encoded:
        """A gradient, shape ``(P,)``, and what earlier pushes owe, for each shard.

        A sum that is not finite is sent as NaN to every shard, so that all of them drop it; the debt stays.
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
        self._sent = Encoded(codec, payloads)
        self._note("push", codec, sum(payload.nbytes for payload in payloads))
        return self._sent

    def decode(self, sequence: int, parts: Sequence[Part], out: Vector) -> Vector:
        """The weights of answer ``sequence``, put together in ``out``, where parts may be already (``Part()``).

        Args:
            sequence: Of the answer; answers come in order.
            parts: One per shard.
            out: Shape ``(P,)``; not changed by the client until the next answer is decoded, into another one.

        Raises:
            ProtocolError: a difference to other weights than those held.
        """
        size = 0
        for part, bound in zip(parts, self._bounds, strict=True):
            if part.difference is not None:
                self._add(part, bound, out)
                size += part.difference.nbytes
                continue
            if part.weights is not None:
                np.copyto(out[bound], part.weights)
            size += out[bound].nbytes
        if self._held is not None:
            self._choice.received(self._held, out)
        self._held, self._held_answer = out, sequence
        self._note("reply", parts[0].codec, size)
        return out

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """An exchange took so long, without the time that the shards took to serve it."""
        self._choice.exchanged(sent_bytes, received_bytes, seconds)

    def report(self) -> dict[str, Any]:
        """Messages and bytes by direction and codec, the debt relative to the last push, and the decisions."""
        residual, sent = float(np.linalg.norm(self._feedback.residual)), self._norm_sent()
        return {
            **self._uses,
            "residual": round(residual / sent, 6) if sent else 0.0,
            "decisions": self._choice.decisions(),
        }

    def _add(self, part: Part, bound: slice, out: Vector) -> None:
        if self._held is None or part.base != self._held_answer or part.difference is None:
            raise ProtocolError(
                f"Answer: expected all weights, or a difference to those of answer {self._held_answer}. Received: a "
                f"difference to answer {part.base}."
            )
        held, new = self._held[bound], out[bound]
        for block, coded in blocks(part.codec, new.size):
            part.codec.decode(part.difference[coded], new[block])
            new[block] += held[block]

    def _norm_sent(self) -> float:
        """Of what the last push was decoded as."""
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
