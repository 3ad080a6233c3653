"""Adaptive choice of the codecs of one worker's pushes and replies: measurements in, decisions out.

For a pair of codecs ``(b, c)``, one per direction, the predicted time of an iteration is weighted with the loss of the
codecs, because a step on a gradient of relative squared error omega is worth ``1 / (1 + omega)`` exact ones::

    cost(b, c) = T(b, c) * (1 + omega_b) * (1 + omega_c)
    T(b, c)    = T_worker + T_exchange             max(T_worker, T_exchange) if they overlap
    T_worker   = compute + encode(b) + decode(b) + decode(c)
    T_exchange = latency + bytes(b) * send + decode(b) + bytes(c) * receive + encode(c) + decode(c)

because the encoding side also decodes, to compute the residual. The cheapest pair is chosen among codecs that lose at
most the error budget. It replaces the pair in use if it costs at least 3 % less, or at once if that pair takes longer
than the identity. On a fast link the identity is chosen: coding takes longer than it saves, and a byte is assigned the
least time that the measurements allow. To separate latency from bandwidth, some pushes and replies use another codec;
with error feedback no information is lost in the long run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.codecs.base import Codec

HYSTERESIS = 0.03
REMEMBERED = 9
PROBE_EVERY = 25  # pushes between probes; every second push is one until the link is known
Float64s = npt.NDArray[np.float64]

KEEP = 0.97  # decay factor of the weights of earlier exchanges
ENOUGH = 12
_FIRST = 4  # exchanges before the next one is predicted
_ALIKE = 0.001  # weight of the assumption that both directions are alike
_RIDGE = 1e-6
_CLIP = 4.0


@dataclass(frozen=True)
class LinkTimes:
    """The time of an exchange is ``latency_s + sent * send_s_per_byte + received * receive_s_per_byte``."""

    latency_s: float
    send_s_per_byte: float
    receive_s_per_byte: float

    def seconds(self, sent_bytes: float, received_bytes: float) -> float:
        """Return the time of an exchange of this size."""
        return self.latency_s + sent_bytes * self.send_s_per_byte + received_bytes * self.receive_s_per_byte


class LinkEstimate:
    """Least squares with exponentially decaying weights.

    Only exchanges of different sizes separate latency from bandwidth. An exchange that takes more than four times as
    long as expected counts as four times the expectation. After three in a row the estimate of the link restarts.

    Args:
        unit_bytes: Size of a large message, used only to scale numbers.
    """

    def __init__(self, unit_bytes: int) -> None:
        self._unit = max(unit_bytes, 1)
        self._restart()

    def _restart(self) -> None:
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._variance = 0.0
        self._count = self._strange = 0

    @property
    def known(self) -> bool:
        """Whether enough exchanges were measured."""
        return self._count >= ENOUGH

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Add the time of an exchange."""
        row = np.array([1.0, sent_bytes / self._unit, received_bytes / self._unit])
        if self._count >= _FIRST:
            expected = max(float(row @ self._solve()[0]), 1e-6)
            strange = not expected / _CLIP <= seconds <= expected * _CLIP
            self._strange = self._strange + 1 if strange else 0
            if self._strange == 3:
                self._restart()
            else:
                seconds = min(seconds, _CLIP * expected)
                self._variance += (1 - KEEP) * ((seconds - expected) ** 2 - self._variance)
        self._squares = KEEP * self._squares + np.outer(row, row)
        self._products = KEEP * self._products + seconds * row
        self._count += 1

    def link(self) -> LinkTimes:
        """Return the estimate of the link; the time of a byte is reduced by one standard error."""
        solution, inverse = self._solve()
        slack = np.sqrt(np.maximum(self._variance * np.diag(inverse), 0.0))
        send, receive = np.maximum(solution[1:] - slack[1:], 0.0) / self._unit
        return LinkTimes(max(0.0, float(solution[0])), float(send), float(receive))

    def _solve(self) -> tuple[Float64s, Float64s]:
        """Return (latency, send, receive) in seconds and units, and the inverse of their normal matrix."""
        total = max(float(self._squares[0, 0]), 1.0)
        alike = np.array([0.0, 1.0, -1.0])
        squares = self._squares + total * (_ALIKE * np.outer(alike, alike) + _RIDGE * np.eye(3))
        inverse: Float64s = np.asarray(np.linalg.inv(squares), np.float64)
        return inverse @ self._products, inverse


@dataclass(frozen=True)
class CodecLoss:
    """Costs of a codec for the vectors of one worker.

    Attributes:
        error: Relative squared error, omega.
        encode_s: Seconds to encode one vector of the model's size.
        decode_s: Seconds to decode one vector of the model's size.
    """

    error: float
    encode_s: float
    decode_s: float


EXACT = CodecLoss(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Decision:
    """The codecs from now on, and the measurements behind the choice."""

    push: str
    reply: str
    seconds: float
    seconds_before: float
    compute_s: float
    link: LinkTimes


class AdaptiveWidth:
    """Choice of codecs for one worker; it begins with the widest or the narrowest codec in both directions.

    Attributes:
        push: Codec of the next push.
        reply: Codec of the next reply.

    Args:
        codecs: Codecs to choose from, the widest first; the first one is lossless. The last three are for probes.
        size: Number of elements of the model.
        error_budget: Maximum omega of a codec that may be chosen.
        pipelined: Whether the worker computes while it exchanges, and gains nothing by a shorter exchange then.
        narrow: Begin with the narrowest codec that the error budget allows, and choose between it and the next wider
            one. For exchanges so rare and long that the first ones, before the link is known, would take as long as the
            training; what coding takes does not matter then. A delta of weights that has been encoded so does not show
            what it has lost; until a wider one shows it, it counts as much as in pushes.
    """

    def __init__(
        self, codecs: Sequence[Codec], size: int, *, error_budget: float, pipelined: bool, narrow: bool = False
    ) -> None:
        self._bytes = {codec.name: codec.encoded_bytes(size) for codec in codecs}
        self._budget, self._pipelined = error_budget, pipelined
        self._link = LinkEstimate(4 * size)
        self._compute: deque[float] = deque(maxlen=REMEMBERED)
        widest = codecs[0].name
        self._push_losses: dict[str, CodecLoss] = {widest: EXACT}
        self._reply_losses: dict[str, CodecLoss] = {widest: EXACT}
        self._wider, self._probe, self._narrowest = (codec.name for codec in codecs[-3:])
        self._exact = (widest, widest)
        self._chosen = (self._narrowest, self._narrowest) if narrow else self._exact
        self._narrow = narrow
        self._pushes = self._probes = 0
        self.push, self.reply = self._chosen

    def choose(self) -> Decision | None:
        """Choose the codecs of the next push; return a new decision, or None."""
        decision = self._decide()
        self.push, self.reply = self._chosen
        self._pushes += 1
        if self._pushes % (PROBE_EVERY if self._link.known else 2) == 0:
            self._probes += 1
            if self._probes % 3 != 1:
                self.push = self._other(self.push, self._push_losses)
            if self._probes % 3 != 2:
                self.reply = self._other(self.reply, self._reply_losses)
        return decision

    def computed(self, seconds: float) -> None:
        """Add the time of a gradient; the median of the last nine counts."""
        self._compute.append(seconds)

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Add the time of an exchange, without the service time of the shards."""
        self._link.exchanged(sent_bytes, received_bytes, seconds)

    def lost_in_pushes(self, losses: Mapping[str, CodecLoss]) -> None:
        """Update the costs of these codecs for gradients."""
        self._push_losses.update(losses)
        if self._narrow and not self._link.known:
            self._reply_losses = {**losses, **self._reply_losses}
            self._chosen = (self._candidates(self._push_losses)[-1],) * 2

    def lost_in_replies(self, losses: Mapping[str, CodecLoss]) -> None:
        """Update the costs of these codecs for deltas of weights.

        A delta is known only after encoding with the codec in use. Codecs of the same width can encode it without loss,
        so only the costs of narrower ones are used.
        """
        in_use = self._bytes[self.reply]
        unknown = {n: loss for n, loss in losses.items() if self._bytes[n] < in_use or n not in self._reply_losses}
        self._reply_losses.update(unknown)

    def _other(self, name: str, losses: Mapping[str, CodecLoss]) -> str:
        """Return a codec of another size, preferably a narrower one, because a wide one takes longer."""
        if name == self._probe:
            return self._narrowest if self._narrowest in self._affordable(losses) else self._wider
        wider = name == self._narrowest and self._probes % 4 == 0 and not self._narrow
        return self._wider if wider else self._probe

    def _decide(self) -> Decision | None:
        """Return a decision for other codecs; None to keep those in use."""
        if not self._link.known or not self._compute or self._chosen[1] not in self._reply_losses:
            return None
        link, compute_s = self._link.link(), statistics.median(self._compute)
        pairs = itertools.product(self._candidates(self._push_losses), self._candidates(self._reply_losses))
        costs = {pair: self._cost(link, compute_s, *pair) for pair in pairs}
        now = self._chosen
        best = min(costs, key=lambda pair: costs[pair])
        before = self._seconds(link, compute_s, *now)
        pays = now == self._exact or before <= self._seconds(link, compute_s, *self._exact)
        if best == now or (pays and costs[best] > (1 - HYSTERESIS) * costs.get(now, math.inf)):
            return None
        self._chosen = best
        return Decision(*best, self._seconds(link, compute_s, *best), before, compute_s, link)

    def _candidates(self, losses: Mapping[str, CodecLoss]) -> list[str]:
        """Return the codecs to choose from, the widest first."""
        return self._affordable(losses)[-2:] if self._narrow else self._affordable(losses)

    def _affordable(self, losses: Mapping[str, CodecLoss]) -> list[str]:
        return [name for name in self._bytes if name in losses and losses[name].error <= self._budget]

    def _cost(self, link: LinkTimes, compute_s: float, push: str, reply: str) -> float:
        error = (1 + self._push_losses[push].error) * (1 + self._reply_losses[reply].error)
        return self._seconds(link, compute_s, push, reply) * error

    def _seconds(self, link: LinkTimes, compute_s: float, push: str, reply: str) -> float:
        up, down = self._push_losses[push], self._reply_losses[reply]
        worker = compute_s + up.encode_s + up.decode_s + down.decode_s
        exchange = link.seconds(self._bytes[push], self._bytes[reply]) + up.decode_s + down.encode_s + down.decode_s
        return max(worker, exchange) if self._pipelined else worker + exchange
