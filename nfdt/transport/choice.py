"""Which codecs a worker's client uses: fixed ones, or those that its own measurements suggest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from nfdt.codecs import IDENTITY, WIDTHS, Codec, make_codec
from nfdt.codecs.adaptive import AdaptiveWidth, Decision, Loss
from nfdt.codecs.base import Vector, relative_error
from nfdt.codecs.buckets import BUCKET
from nfdt.core.specs.algorithm import AlgorithmSpec

MEASURE_EVERY = 50  # pushes between two looks at what codecs lose
SAMPLE_BUCKETS = 128
MAX_DECISIONS = 50


class Choice(Protocol):
    """Names the codecs of the next exchange, and is told what happens."""

    @property
    def push(self) -> Codec:
        """For gradients."""
        ...

    @property
    def reply(self) -> Codec:
        """For differences of weights."""
        ...

    def pushes(self, gradient: Vector, residual: Vector, compute_s: float) -> None:
        """The sum of these is about to be pushed; the gradient took so long to compute, 0 if nobody knows."""
        ...

    def received(self, before: Vector, after: Vector) -> None:
        """The weights held have changed."""
        ...

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """An exchange took so long, without the time that shards took to serve it."""
        ...

    def decisions(self) -> list[dict[str, Any]]:
        """What was decided and why, the oldest first, ready for JSON."""
        ...


class FixedChoice:
    """The codecs that were asked for.

    Attributes:
        push: For gradients.
        reply: For differences of weights.
    """

    def __init__(self, push: Codec, reply: Codec) -> None:
        self.push, self.reply = push, reply

    def pushes(self, gradient: Vector, residual: Vector, compute_s: float) -> None:
        """Changes nothing."""

    def received(self, before: Vector, after: Vector) -> None:
        """Changes nothing."""

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Changes nothing."""

    def decisions(self) -> list[dict[str, Any]]:
        """None."""
        return []


class AdaptiveChoice:
    """What :class:`nfdt.codecs.adaptive.AdaptiveWidth` decides, from measurements on a sample of the vectors.

    Args:
        width: Decides.
        clock: Seconds, for the time that codecs take.
    """

    def __init__(self, width: AdaptiveWidth, clock: Callable[[], float] = time.perf_counter) -> None:
        self._width = width
        self._clock = clock
        self._codecs = {codec.name: codec for codec in WIDTHS}
        self._pushes = 0
        self._decisions: list[dict[str, Any]] = []
        self._replies_due = True

    @property
    def push(self) -> Codec:
        """See ``Choice``."""
        return self._codecs[self._width.push]

    @property
    def reply(self) -> Codec:
        """See ``Choice``."""
        return self._codecs[self._width.reply]

    def pushes(self, gradient: Vector, residual: Vector, compute_s: float) -> None:
        """See ``Choice``."""
        if compute_s:
            self._width.computed(compute_s)
        if self._pushes % MEASURE_EVERY == 0:
            self._width.lost_in_pushes(self._losses(_sample(gradient) + _sample(residual), gradient.size))
            self._replies_due = True
        self._pushes += 1
        if decision := self._width.begin():
            self._decisions = [*self._decisions, _described(decision, self._pushes)][-MAX_DECISIONS:]

    def received(self, before: Vector, after: Vector) -> None:
        """See ``Choice``."""
        if not self._replies_due:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            difference = _sample(after) - _sample(before)
        if losses := self._losses(difference, after.size):
            self._width.lost_in_replies(losses)
            self._replies_due = False

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """See ``Choice``."""
        self._width.exchanged(sent_bytes, received_bytes, seconds)

    def decisions(self) -> list[dict[str, Any]]:
        """See ``Choice``."""
        return self._decisions

    def _losses(self, sample: Vector, size: int) -> Mapping[str, Loss]:
        """What each codec costs on ``size`` elements like these; zeros and what is not finite teach nothing."""
        if not sample.any() or not np.isfinite(sample).all():
            return {}
        decoded, scale = sample.copy(), size / sample.size
        losses = {}
        for codec in WIDTHS[1:]:
            began = self._clock()
            payload = codec.encode(sample)
            encoded = self._clock()
            codec.decode(payload, decoded)
            done = self._clock()
            error = relative_error(sample, decoded)
            losses[codec.name] = Loss(error, (encoded - began) * scale, (done - encoded) * scale)
        return losses


def make_choice(spec: AlgorithmSpec, size: int, *, clock: Callable[[], float] = time.perf_counter) -> Choice | None:
    """The choice of one worker of such a job, for a model of ``size`` elements; None if nothing is encoded.

    ``clock`` is what an adaptive choice measures the time of codecs with.
    """
    if spec.codec_facts.adaptive:
        width = AdaptiveWidth(WIDTHS, size, error_budget=spec.error_budget, pipelined=spec.overlap > 0)
        return AdaptiveChoice(width, clock)
    push = make_codec(spec.codec, top_k=spec.top_k)
    reply = make_codec(spec.codec_of_replies, top_k=spec.top_k)
    return None if push is reply is IDENTITY else FixedChoice(push, reply)


def _sample(vector: Vector) -> Vector:
    """Whole buckets from all over the vector, or all of a small one."""
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
