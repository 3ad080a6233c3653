"""One worker's stream as its shard sees it: pushes and pulls in, answers out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nfdt.codecs import Codec, find_decoder
from nfdt.codecs.rows import ROWS
from nfdt.core.errors import NfdtError, ProtocolError, ShapeMismatch
from nfdt.core.wire.frames import Assembly, decode_frame, encode_frame, split
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.shard.building import Store
from nfdt.shard.differences import Chain
from nfdt.shard.push import Gradient, Reply, Wish
from nfdt.shard.tensors import BufferPool
from nfdt.transport import shared_memory

logger = logging.getLogger(__name__)

MAX_NAME = 200


class Exchange:
    """Puts one worker's pushes together and answers them.

    Args:
        store: The shard's.
        buffers: Where gradients that come over the stream are put together, or decoded.
        encoders: For differences of weights, by name.
        most_parts: That a round may have.
    """

    def __init__(self, store: Store, buffers: BufferPool, encoders: Mapping[str, Codec], most_parts: int) -> None:
        self._store = store
        self._buffers = buffers
        self._encoders = encoders
        self._most_parts = most_parts
        self._chain = Chain()
        self._complete_at = 0.0  # when the last byte of the request had come
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
            self._chain.answered(header.sequence, reply)
            frames = self._frames(header.sequence, reply)
            del reply  # as large as the model, and the next request may be long in coming
            yield from frames
            del frames

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
            self._segment = shared_memory.accept(offer, self._store.size * 4, pairs=self._store.overlap + 1)
        except OSError as error:  # Refused is one
            logger.info("Gradients of %s come over the stream. %s", self._worker, error)
            return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=False, error=str(error))
        return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=True)

    def _reply(self, header: Frame, payload: memoryview, requests: Iterator[bytes]) -> Reply:
        self._complete_at = time.perf_counter()
        if header.kind == PULL:
            wish = self._wish(header)
            return self._store.pull(self._worker, sequence=header.sequence, min_version=header.version, wish=wish)
        if header.kind != PUSH:
            raise ProtocolError(f"Stream of {self._worker}: expected a push or pull. Received: {header.kind}.")
        if header.codec:
            return self._push_encoded(header, payload, requests)
        wanted = self._store.size * 4
        if header.total_bytes != wanted:
            raise ShapeMismatch(
                f"Push from worker {self._worker}: expected {wanted} bytes ({self._store.size} float32). Received: "
                f"{header.total_bytes} bytes. The worker runs another model; restart it."
            )
        if header.shared:  # applied where the worker put it; it stays there until the answer is out
            return self._push(header, self._shared(header))
        with self._buffers.lend() as buffer:
            self._assemble(buffer, header, payload, requests)
            return self._push(header, buffer)

    def _push_encoded(self, header: Frame, payload: memoryview, requests: Iterator[bytes]) -> Reply:
        codec, size = find_decoder(header.codec), self._store.size
        codec.check(header.total_bytes, size)
        if header.shared:
            encoded = self._shared(header).view(np.uint8)[: header.total_bytes]
            codec.check(encoded.size, size)
        else:
            encoded = np.empty(header.total_bytes, np.uint8)
            self._assemble(encoded, header, payload, requests)
        if codec is ROWS:  # the store knows which
            return self._push(header, encoded)
        with self._buffers.lend() as buffer:
            codec.decode(encoded, buffer)
            return self._push(header, buffer)

    def _shared(self, header: Frame) -> Any:
        if self._segment is None:
            raise ProtocolError(
                f"Push {header.sequence} from {self._worker}: expected its gradient on the stream, because no segment "
                "is mapped. Received: none."
            )
        return self._segment.gradient(header.sequence)

    def _assemble(self, buffer: Any, header: Frame, payload: memoryview, requests: Iterator[bytes]) -> None:
        assembly = Assembly(buffer)
        assembly.add(header.offset, payload)
        while not assembly.complete:
            chunk, payload = decode_frame(next(requests, b""))
            if chunk.kind != PUSH or chunk.sequence != header.sequence:
                raise ProtocolError(f"Push {header.sequence} from {self._worker}: its chunks are not together.")
            assembly.add(chunk.offset, payload)
        self._complete_at = time.perf_counter()

    def _push(self, header: Frame, values: Any) -> Reply:
        numbers = {"round": header.round, "part": header.part, "parts": max(header.parts, 1)}
        numbers["computed_on"] = header.computed_on
        rate = header.rate or 1.0
        if not 0.0 < rate < math.inf or header.parts > self._most_parts:
            raise ProtocolError(
                f"Push {header.sequence} from {self._worker}: expected a finite factor of the learning rate above 0, "
                f"and at most {self._most_parts} parts. Received: factor {rate}, {header.parts} parts."
            )
        gradient = Gradient(header.sequence, values, max(header.samples, 1), **numbers, rate=rate)
        wish = self._wish(header)
        return self._store.push(self._worker, gradient, want_weights=header.want_weights, wish=wish)

    def _wish(self, header: Frame) -> Wish | None:
        codec = self._encoders[find_decoder(header.reply_codec).name] if header.reply_codec else None
        return self._chain.wish(codec)

    def _frames(self, sequence: int, reply: Reply) -> Iterator[bytes]:
        """The answer to a push or pull."""
        content: Any = reply.weights
        fields: dict[str, Any] = {"sequence": sequence, "version": reply.version, "staleness": reply.staleness}
        fields |= {"applied": reply.applied, "served_us": int((time.perf_counter() - self._complete_at) * 1e6)}
        if reply.difference is not None:
            content = reply.difference.payload
            fields |= {"codec": reply.difference.codec.name, "base": reply.difference.base}
        if content is None:
            yield encode_frame(Frame(kind=ACKNOWLEDGE, **fields))
            return
        view = content.data.cast("B") if content.size else memoryview(b"")
        fields |= {"kind": WEIGHTS, "total_bytes": view.nbytes}
        if self._segment and view.nbytes <= self._store.size * 4:
            self._segment.weights(sequence).view(np.uint8)[: view.nbytes] = view
            yield encode_frame(Frame(**fields, shared=True))
            return
        for part in split(view.nbytes):
            yield encode_frame(Frame(**fields, offset=part.start), view[part])
