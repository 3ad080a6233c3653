"""One worker's stream as its shard sees it: pushes and pulls in, answers out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from nfdt.core.errors import NfdtError, ProtocolError, ShapeMismatch
from nfdt.core.wire.frames import Assembly, decode_frame, encode_frame, split
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.shard.push import Gradient, Reply
from nfdt.shard.store import ShardStore
from nfdt.shard.tensors import BufferPool
from nfdt.transport import shared_memory

logger = logging.getLogger(__name__)

MAX_NAME = 200


class Exchange:
    """Puts one worker's pushes together and answers them.

    Args:
        store: The shard's.
        buffers: Where gradients that come over the stream are put together.
    """

    def __init__(self, store: ShardStore, buffers: BufferPool) -> None:
        self._store = store
        self._buffers = buffers
        self._worker = ""
        self._segment: shared_memory.Segment | None = None

    def answer(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Answer every push and pull; the first mistake is answered with an error and ends the stream."""
        for data in requests:
            header, payload = decode_frame(data)
            try:
                self._introduce(header)
                if header.kind == OFFER:
                    yield encode_frame(self._accept(header))
                    continue
                reply = self._reply(header, payload, requests)
            except NfdtError as error:
                text = f"{type(error).__name__}: {error}"
                yield encode_frame(Frame(kind=ERROR, sequence=header.sequence, error=text))
                return
            yield from self._frames(header.sequence, reply)

    def _introduce(self, header: Frame) -> None:
        name = header.worker or self._worker
        if not name or len(name) > MAX_NAME or (self._worker and name != self._worker):
            raise ProtocolError(
                f"Stream of {self._worker or 'nobody'}: expected one worker's name of at most {MAX_NAME} characters "
                f"in the first frame. Received: {name[:MAX_NAME]!r}."
            )
        self._worker = name

    def _accept(self, offer: Frame) -> Frame:
        """Map what the worker offers; where that fails the stream goes on without it."""
        try:
            self._segment = shared_memory.accept(offer, self._store.size * 4)
        except OSError as error:  # Refused is one
            logger.info("Gradients of %s come over the stream. %s", self._worker, error)
            return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=False, error=str(error))
        return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=True)

    def _reply(self, header: Frame, payload: memoryview, requests: Iterator[bytes]) -> Reply:
        if header.kind == PULL:
            return self._store.pull(self._worker, min_version=header.version)
        if header.kind != PUSH:
            raise ProtocolError(f"Stream of {self._worker}: expected a push or pull. Received: {header.kind}.")
        wanted = self._store.size * 4
        if header.total_bytes != wanted:
            raise ShapeMismatch(
                f"Push from worker {self._worker}: expected {wanted} bytes ({self._store.size} float32). Received: "
                f"{header.total_bytes} bytes. The worker runs another model; restart it."
            )
        if header.shared:
            return self._push_shared(header)
        with self._buffers.lend() as buffer:
            self._assemble(buffer, header, payload, requests)
            return self._push(header, buffer)

    def _push_shared(self, header: Frame) -> Reply:
        """Apply the gradient where the worker put it; it stays there until the answer is out."""
        if self._segment is None:
            raise ProtocolError(
                f"Push {header.sequence} from {self._worker}: expected its gradient on the stream, because no segment "
                "is mapped. Received: none."
            )
        return self._push(header, self._segment.gradient)

    def _assemble(self, buffer: Any, header: Frame, payload: memoryview, requests: Iterator[bytes]) -> None:
        assembly = Assembly(buffer)
        assembly.add(header.offset, payload)
        while not assembly.complete:
            chunk, payload = decode_frame(next(requests, b""))
            if chunk.kind != PUSH or chunk.sequence != header.sequence:
                raise ProtocolError(f"Push {header.sequence} from {self._worker}: its chunks are not together.")
            assembly.add(chunk.offset, payload)

    def _push(self, header: Frame, values: Any) -> Reply:
        numbers = {"round": header.round, "part": header.part, "parts": max(header.parts, 1)}
        gradient = Gradient(header.sequence, values, max(header.samples, 1), **numbers)
        return self._store.push(self._worker, gradient, want_weights=header.want_weights)

    def _frames(self, sequence: int, reply: Reply) -> Iterator[bytes]:
        """The answer to a push or pull."""
        fields: dict[str, Any] = {"kind": ACKNOWLEDGE if reply.weights is None else WEIGHTS, "sequence": sequence}
        fields |= {"version": reply.version, "staleness": reply.staleness, "applied": reply.applied}
        if reply.weights is None:
            yield encode_frame(Frame(**fields))
        elif self._segment:
            np.copyto(self._segment.weights, reply.weights)
            yield encode_frame(Frame(**fields, shared=True, total_bytes=reply.weights.nbytes))
        else:
            view = reply.weights.data.cast("B") if reply.weights.size else memoryview(b"")
            for part in split(view.nbytes):
                yield encode_frame(Frame(**fields, total_bytes=view.nbytes, offset=part.start), view[part])
