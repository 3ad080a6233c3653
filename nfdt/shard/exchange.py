"""The shard's side of one worker's stream: receives pushes and pulls, sends replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from nfdt.codecs import Codec, find_decoder
from nfdt.codecs.sparse import ROWS
from nfdt.core.errors import NfdtError, ProtocolError, ShapeMismatch
from nfdt.core.wire import shared_memory
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.shard.buffers import BufferPool
from nfdt.shard.building import Store
from nfdt.shard.delta_reply import ReplyHistory
from nfdt.shard.messages import DeltaRequest, Gradient, Reply
from nfdt.shard.terms import Terms

logger = logging.getLogger(__name__)

MAX_NAME = 200
MAX_ERROR = 4000  # characters


class WorkerExchange:
    """Server of one worker's requests.

    Args:
        store: Store of the shard.
        buffers: Buffers for gradients that arrive on the stream or are decoded.
        encoders: Codecs for deltas of weights, by name.
        terms: Requests that the job allows.
        worker: Name of the worker.
    """

    def __init__(
        self, store: Store, buffers: BufferPool, encoders: Mapping[str, Codec], terms: Terms, worker: str
    ) -> None:
        self._store = store
        self._buffers = buffers
        self._encoders = encoders
        self._terms, self._worker = terms, worker
        self._history = ReplyHistory()
        self._complete_at = 0.0  # arrival of the last byte of the request
        self._segment: shared_memory.Segment | None = None

    def serve(self, stream: FrameStream) -> None:
        """Answer every push and pull; the first error is sent to the worker and ends the stream.

        Raises:
            OSError: the connection to the worker is lost, or stalled in the middle of a frame.
        """
        sequence, before = 0, None
        try:
            while (header := stream.receive_header(patiently=True)) is not None:
                sequence = header.sequence
                self._introduce(header)
                if header.kind == OFFER:
                    stream.send(self._accept(header))
                    continue
                self._terms.check_order(self._worker, sequence, before)
                before = sequence
                reply = self._reply(header, stream)
                self._history.add(sequence, reply)
                self._answer(stream, sequence, reply)
                del reply  # as large as the model, and the next request may come much later
        except EOFError as error:
            self._refuse(stream, sequence, ProtocolError(str(error)))
        except NfdtError as error:
            self._refuse(stream, sequence, error)
        except OSError:
            raise
        except Exception as error:  # an error in this code or the user's: the worker receives it, too
            logger.exception("A request of %s failed", self._worker)
            self._refuse(stream, sequence, ProtocolError(f"It failed on the shard: {type(error).__name__}: {error}"))

    @staticmethod
    def _refuse(stream: FrameStream, sequence: int, error: NfdtError) -> None:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        stream.send(Frame(kind=ERROR, sequence=sequence, error=text))
        stream.end()

    def _introduce(self, header: Frame) -> None:
        if header.worker and header.worker != self._worker:
            raise ProtocolError(
                f"Stream of {self._worker}: expected this worker's name, as its ticket says. "
                f"Received: {header.worker[:MAX_NAME]!r}."
            )

    def _accept(self, offer: Frame) -> Frame:
        """Map the memory that the worker offers; if that fails the stream continues without it."""
        try:
            self._segment = shared_memory.accept(offer, self._store.size * 4, pairs=self._store.overlap + 1)
        except OSError as error:  # includes Refused
            logger.info("Gradients of %s come over the stream. %s", self._worker, error)
            return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=False, error=str(error))
        return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=True)

    def _reply(self, header: Frame, stream: FrameStream) -> Reply:
        self._complete_at = time.perf_counter()
        if header.kind == PULL:
            delta = self._delta_request(header)
            return self._store.pull(self._worker, sequence=header.sequence, min_version=header.version, delta=delta)
        if header.kind != PUSH:
            raise ProtocolError(f"Stream of {self._worker}: expected a push or pull. Received: {header.kind}.")
        self._terms.check_push(self._worker, header, self._store.closed_round)
        if header.codec:
            return self._push_encoded(header, stream)
        wanted = self._store.size * 4
        if header.total_bytes != wanted:
            raise ShapeMismatch(
                f"Push from worker {self._worker}: expected {wanted} bytes ({self._store.size} float32). Received: "
                f"{header.total_bytes} bytes. The worker runs another model; restart it."
            )
        if header.shared:  # applied in the worker's shared memory; it stays there until the reply is sent
            return self._push(header, self._shared(header))
        with self._buffers.lend() as buffer:
            self._receive(stream, buffer)
            return self._push(header, buffer)

    def _push_encoded(self, header: Frame, stream: FrameStream) -> Reply:
        codec, size = find_decoder(header.codec), self._store.size
        codec.check(header.total_bytes, size)
        if header.shared:
            encoded = self._shared(header).view(np.uint8)[: header.total_bytes]
            codec.check(encoded.size, size)
        else:
            encoded = np.empty(header.total_bytes, np.uint8)
            self._receive(stream, encoded)
        if codec is ROWS:  # the store decodes rows itself
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

    def _receive(self, stream: FrameStream, buffer: Any) -> None:
        stream.receive_into(buffer)
        self._complete_at = time.perf_counter()

    def _push(self, header: Frame, values: Any) -> Reply:
        numbers = {"round": header.round, "part": header.part, "parts": max(header.parts, 1)}
        numbers["computed_on"] = header.computed_on
        rate, samples, tasks = header.rate or 1.0, max(header.samples, 1), tuple(header.tasks)
        gradient = Gradient(
            header.sequence, values, samples, **numbers, rate=rate, tasks=tasks, denominator=header.denominator
        )
        delta = self._delta_request(header)
        return self._store.push(self._worker, gradient, want_weights=header.want_weights, delta=delta)

    def _delta_request(self, header: Frame) -> DeltaRequest | None:
        codec = self._encoders[find_decoder(header.reply_codec).name] if header.reply_codec else None
        return self._history.delta_request(codec)

    def _answer(self, stream: FrameStream, sequence: int, reply: Reply) -> None:
        """Send the reply to a push or pull."""
        content: Any = reply.weights
        header = Frame(sequence=sequence, version=reply.version, staleness=reply.staleness, applied=reply.applied)
        header.served_us = int((time.perf_counter() - self._complete_at) * 1e6)
        if reply.delta is not None:
            content = reply.delta.payload
            header.codec, header.base = reply.delta.codec.name, reply.delta.base
        if content is None:
            header.kind = ACKNOWLEDGE
            stream.send(header)
            return
        header.kind, header.total_bytes = WEIGHTS, content.nbytes
        if self._segment and content.nbytes <= self._store.size * 4:
            self._segment.weights(sequence).view(np.uint8)[: content.nbytes] = content.view(np.uint8)
            header.shared = True
            stream.send(header)
        else:
            stream.send(header, content)
