"""A worker's side of codecs: gradients become bytes, with error feedback; differences become weights again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nfdt.codecs import IDENTITY, Codec, ErrorFeedback
from nfdt.codecs.base import Payload, Vector
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
        size = bounds[-1].stop
        self._feedback = ErrorFeedback(size)
        self._decoded = np.zeros(size, np.float32)  # what the last push was decoded as
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
        owed = self._feedback.owed(gradient)
        if owed is not None:
            self._choice.pushes(owed, compute_s)
        codec = self._choice.push
        payloads = self._nothing(codec, gradient) if owed is None else self._payloads(codec, gradient, owed)
        self._note("push", codec, sum(payload.nbytes for payload in payloads))
        return Encoded(codec, payloads)

    def _nothing(self, codec: Codec, gradient: Vector) -> list[Payload]:
        lost = np.full(gradient.size, np.nan, np.float32)
        return [codec.encode(lost[bound]) for bound in self._bounds]

    def _payloads(self, codec: Codec, gradient: Vector, owed: Vector) -> list[Payload]:
        if codec is IDENTITY:
            exact = gradient if self._feedback.settled else owed.copy()
            self._feedback.sent(None)
            return [codec.encode(exact[bound]) for bound in self._bounds]
        payloads = [codec.encode(owed[bound]) for bound in self._bounds]
        for payload, bound in zip(payloads, self._bounds, strict=True):
            codec.decode(payload, self._decoded[bound])
        self._feedback.sent(self._decoded)
        return payloads

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
        sent = float(np.linalg.norm(self._decoded))
        return {
            **self._uses,
            "residual": round(float(np.linalg.norm(self._feedback.residual)) / sent, 6) if sent else 0.0,
            "decisions": self._choice.decisions(),
        }

    def _add(self, part: Part, bound: slice, out: Vector) -> None:
        if self._held is None or part.base != self._held_answer or part.difference is None:
            raise ProtocolError(
                f"Answer: expected all weights, or a difference to those of answer {self._held_answer}. Received: a "
                f"difference to answer {part.base}."
            )
        part.codec.decode(part.difference, out[bound])
        np.add(self._held[bound], out[bound], out=out[bound])

    def _note(self, direction: str, codec: Codec, size: int) -> None:
        use = self._uses[direction].setdefault(codec.name, {"messages": 0, "bytes": 0})
        use["messages"] += 1
        use["bytes"] += size
