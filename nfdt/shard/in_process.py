"""Shards in the worker's own process: no network, no copies. For tests and a single worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import numpy as np

from nfdt.codecs import Codec
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.errors import UsageError
from nfdt.shard.messages import DeltaRequest, Gradient, Reply, ReplyHistory
from nfdt.shard.store import ShardStore
from nfdt.transport.base import (
    InFlight,
    InFlightRequest,
    Pulled,
    Pushed,
    PushOptions,
    Vector,
    check_gradient,
    shard_bounds,
)
from nfdt.transport.choice import CodecChoice
from nfdt.transport.coding import Coding


@dataclass(frozen=True)
class Leaving:
    """Push that has not reached the shards yet.

    Attributes:
        sequence: Sequence number of the push.
        parts: Part of the gradient for each shard.
        sizes: Bytes of each part as it is sent.
        fields: Other fields of :class:`~nfdt.shard.messages.Gradient`.
        want_weights: Whether the reply contains weights.
        reply_codec: Codec of the deltas to request; None for all weights.
    """

    sequence: int
    parts: list[Vector]
    sizes: list[int]
    fields: dict[str, Any]
    want_weights: bool
    reply_codec: Codec | None


def reply_bytes(reply: Reply) -> int:
    """Return the size of a shard's reply, in bytes of weights or of a delta."""
    if reply.delta is not None:
        return int(reply.delta.payload.nbytes)
    return 0 if reply.weights is None else int(reply.weights.nbytes)


class InProcessClient:
    """``ParameterClient`` that calls the stores directly: a push is answered as soon as it is sent.

    Args:
        stores: Stores of the shards, in order.
        layout: Layout of the whole model.
        worker: Name of this worker.
        overlap: Number of pushes that may be unanswered while another one is sent; at most that of the stores.
        choice: Choice of codecs; None disables encoding.
    """

    def __init__(
        self,
        stores: Sequence[ShardStore],
        layout: ParameterLayout,
        worker: str,
        *,
        overlap: int = 0,
        choice: CodecChoice | None = None,
    ) -> None:
        self._stores = list(stores)
        self._histories = [ReplyHistory() for _ in self._stores]
        self._bounds = shard_bounds(layout, len(self._stores))
        self._worker = worker
        self._sequence = 0
        self._newest = 0
        self._answers: dict[int, list[Reply]] = {}
        self._coding = Coding(choice, self._bounds) if choice else None
        self._pushes = InFlight(overlap, self._take, lambda count: True)
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def codecs(self) -> Mapping[str, Any]:
        """Report of the codecs in use, ready for JSON; empty if nothing is encoded."""
        return self._coding.report() if self._coding else {}

    def pull(self, min_version: int = 0, *, exact: bool = True, kept: bool = False) -> Pulled:
        """Return the current weights, at ``min_version`` or later on every shard.

        Raises:
            UsageError: kept weights are wanted; these stores keep none.
        """
        if kept:
            raise UsageError("Pull: expected shards that keep weights, on gRPC. Received: stores in this process.")
        self._pushes.check_pull()
        self._newest = self._sequence = self._sequence + 1
        replies = []
        for store, history in zip(self._stores, self._histories, strict=True):
            fields: dict[str, Any] = {"sequence": self._sequence, "delta": self._delta_request(history, exact)}
            replies.append(store.pull(self._worker, min_version=min_version, **fields))
            history.add(self._sequence, replies[-1])
        self.bytes_received += sum(map(reply_bytes, replies))
        weights = cast(Vector, self._weights(self._sequence, replies))
        return Pulled(weights, tuple(r.version for r in replies), self._sequence)

    def begin_push(self, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> InFlightRequest[Pushed]:
        """Send a gradient, which the stores apply at once."""
        leaving = self._leave(gradient, options)
        self._deliver(leaving)
        return self._pushes.add(leaving.sequence)

    def push(self, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> Pushed:
        """Send a gradient and return the reply."""
        return self.begin_push(gradient, **options).result()

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _leave(self, gradient: Vector | Pieces, options: PushOptions) -> Leaving:
        """Prepare a push: the part of a worker's work that needs no waiting."""
        if isinstance(gradient, Pieces):
            gradient = gradient.joined()
        check_gradient(gradient, self._bounds)
        self._pushes.check_push()
        self._sequence += 1
        fields: dict[str, Any] = {"computed_on": self._newest, **options}
        fields.pop("tickets", b"")  # there is no network
        want_weights, compute_s = fields.pop("want_weights", True), fields.pop("compute_s", 0.0)
        sizes, parts = self._parts(gradient, compute_s)
        reply_codec = self._coding.reply_codec if self._coding and want_weights else None
        self.bytes_sent += sum(sizes)
        return Leaving(self._sequence, parts, sizes, fields, want_weights, reply_codec)

    def _deliver(self, leaving: Leaving) -> list[Reply]:
        """Send the push to the shards, and keep their replies."""
        replies: list[Reply] = []
        for store, history, part in zip(self._stores, self._histories, leaving.parts, strict=True):
            push, delta = Gradient(leaving.sequence, part, **leaving.fields), history.delta_request(leaving.reply_codec)
            replies.append(store.push(self._worker, push, want_weights=leaving.want_weights, delta=delta))
            history.add(leaving.sequence, replies[-1])
        self._answers[leaving.sequence] = replies
        self.bytes_received += sum(map(reply_bytes, replies))
        return replies

    def _take(self, sequence: int) -> Pushed:
        replies = self._answers.pop(sequence)
        weights = self._weights(sequence, replies)
        if weights is not None:
            self._newest = sequence
        return Pushed.of(weights, replies, sequence)

    def _parts(self, gradient: Vector, compute_s: float) -> tuple[list[int], list[Vector]]:
        """Return the bytes sent to each shard, and its part of the gradient, decoded as after a network transfer."""
        if self._coding is None:
            parts = [gradient[bound] for bound in self._bounds]
            return [part.nbytes for part in parts], parts
        payloads = self._coding.encode(gradient, compute_s)
        decoded = np.empty_like(gradient)
        for payload, bound in zip(payloads, self._bounds, strict=True):
            self._coding.push_codec.decode(payload, decoded[bound])
        return [payload.nbytes for payload in payloads], [decoded[bound] for bound in self._bounds]

    def _delta_request(self, history: ReplyHistory, exact: bool) -> DeltaRequest | None:
        return history.delta_request(self._coding.reply_codec) if self._coding and not exact else None

    def _weights(self, sequence: int, replies: Sequence[Reply]) -> Vector | None:
        parts = [reply.weights if reply.delta is None else reply.delta for reply in replies]
        if any(part is None for part in parts):
            return None
        if self._coding is None:
            whole = [reply.weights for reply in replies if reply.weights is not None]
            return whole[0] if len(whole) == 1 else np.concatenate(whole)
        return self._coding.decode(sequence, parts, np.empty(self._bounds[-1].stop, np.float32))
