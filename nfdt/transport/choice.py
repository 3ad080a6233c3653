"""Choice of the codecs of a worker's client: fixed, or adapted to its own measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nfdt.codecs import IDENTITY, WIDTHS, Codec, make_codec
from nfdt.codecs.adaptive import AdaptiveWidth, CodecLoss, Decision
from nfdt.codecs.base import BUCKET, Vector, relative_error
from nfdt.core.specs.algorithm import AlgorithmSpec

MEASURE_EVERY = 50  # pushes between two measurements of the loss of codecs
SAMPLE_BUCKETS = 128
MAX_DECISIONS = 50


class CodecChoice:
    """Choice of the codecs of the next exchange; here those given by the options, whatever earlier ones took.

    Attributes:
        push: Codec of gradients.
        reply: Codec of deltas of weights.
    """

    def __init__(self, push: Codec, reply: Codec) -> None:
        self.push, self.reply = push, reply

    def pushes(self, gradient: Vector, residual: Vector, compute_s: float) -> None:
        """Record the next push, the sum of these vectors; ``compute_s`` is 0 if it is unknown."""

    def received(self, before: Vector, after: Vector) -> None:
        """Record the weights before and after a reply."""

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Record the time of an exchange, without the time that shards took to serve it."""

    def decisions(self) -> list[dict[str, Any]]:
        """Return decisions and their reasons, the oldest first, ready for JSON."""
        return []


class AdaptiveCodecs(CodecChoice):
    """Codecs chosen by :class:`nfdt.codecs.adaptive.AdaptiveWidth`, based on measurements on samples of vectors.

    Args:
        width: Makes the decisions.
        clock: Clock in seconds, for the time that codecs take.
    """

    def __init__(self, width: AdaptiveWidth, clock: Callable[[], float] = time.perf_counter) -> None:
        self._codecs = {codec.name: codec for codec in WIDTHS}
        super().__init__(self._codecs[width.push], self._codecs[width.reply])
        self._width, self._clock = width, clock
        self._pushes = 0
        self._decisions: list[dict[str, Any]] = []
        self._replies_due = True

    def pushes(self, gradient: Vector, residual: Vector, compute_s: float) -> None:
        """Measure the losses from time to time, and choose the codecs."""
        if compute_s:
            self._width.computed(compute_s)
        if self._pushes % MEASURE_EVERY == 0:
            self._width.lost_in_pushes(self._losses(_sample(gradient) + _sample(residual), gradient.size))
            self._replies_due = True
        self._pushes += 1
        if decision := self._width.choose():
            self._decisions = [*self._decisions, _described(decision, self._pushes)][-MAX_DECISIONS:]
        self.push, self.reply = self._codecs[self._width.push], self._codecs[self._width.reply]

    def received(self, before: Vector, after: Vector) -> None:
        """Measure the losses of the difference, once after those of a push."""
        if not self._replies_due:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            delta = _sample(after) - _sample(before)
        if losses := self._losses(delta, after.size):
            self._width.lost_in_replies(losses)
            self._replies_due = False

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Add to the estimate of the link."""
        self._width.exchanged(sent_bytes, received_bytes, seconds)

    def decisions(self) -> list[dict[str, Any]]:
        """Return the newest decisions, the oldest first."""
        return self._decisions

    def _losses(self, sample: Vector, size: int) -> Mapping[str, CodecLoss]:
        """Measure the costs of each codec for ``size`` such elements; none for zero or non-finite samples."""
        if not sample.any() or not np.isfinite(sample).all():
            return {}
        decoded, scale = sample.copy(), size / sample.size
        losses = {}
        for codec in WIDTHS[1:]:
            self._code(codec, sample[:BUCKET], decoded[:BUCKET])  # the first time, it may be compiled
            calls = self._code(codec, sample[:BUCKET], decoded[:BUCKET])
            whole = self._code(codec, sample, decoded)
            times = (call_s + max(0.0, s - call_s) * scale for call_s, s in zip(calls, whole, strict=True))
            losses[codec.name] = CodecLoss(relative_error(sample, decoded), *times)
        return losses

    def _code(self, codec: Codec, sample: Vector, decoded: Vector) -> tuple[float, float]:
        """Return the seconds that encoding and decoding a sample take."""
        began = self._clock()
        payload = codec.encode(sample)
        encoded = self._clock()
        codec.decode(payload, decoded)
        return encoded - began, self._clock() - encoded


def make_choice(
    spec: AlgorithmSpec, size: int, *, clock: Callable[[], float] = time.perf_counter
) -> CodecChoice | None:
    """Make the choice of one worker of a job, for a model of ``size`` elements; None if no codec is used.

    An adaptive choice measures the time of codecs with ``clock``.
    """
    if spec.codec_facts.adaptive:
        options = {"pipelined": spec.hides_exchanges, "narrow": spec.exchange_facts.local}
        return AdaptiveCodecs(AdaptiveWidth(WIDTHS, size, error_budget=spec.error_budget, **options), clock)
    push = make_codec(spec.codec, top_k=spec.top_k)
    reply = make_codec(spec.codec_of_replies, top_k=spec.top_k)
    return None if push is reply is IDENTITY else CodecChoice(push, reply)


def _sample(vector: Vector) -> Vector:
    """Return whole buckets spread over the vector, or all of a small vector."""
    step = vector.size // BUCKET // SAMPLE_BUCKETS
    if step < 2:
        return vector
    return vector[: step * SAMPLE_BUCKETS * BUCKET].reshape(SAMPLE_BUCKETS, step, BUCKET)[:, 0].reshape(-1)


def _described(decision: Decision, push: int) -> dict[str, Any]:
    def mbit(seconds_per_byte: float) -> float | None:
        return round(8e-6 / seconds_per_byte, 3) if seconds_per_byte else None

    return {
        "at_push": push,
        "push": decision.push,
        "reply": decision.reply,
        "predicted_ms": round(decision.seconds * 1000, 3),
        "before_ms": round(decision.seconds_before * 1000, 3),
        "compute_ms": round(decision.compute_s * 1000, 3),
        "latency_ms": round(decision.link.latency_s * 1000, 3),
        "send_mbit": mbit(decision.link.send_s_per_byte),
        "receive_mbit": mbit(decision.link.receive_s_per_byte),
    }
