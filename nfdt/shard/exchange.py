"""The shard's side of one worker's stream: receives pushes and pulls that the job allows, sends replies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nfdt.codecs import IDENTITY, Codec, find_decoder
from nfdt.codecs.sparse import ROWS
from nfdt.core.errors import NfdtError, ProtocolError, ShapeMismatch
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.wire import shared_memory
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.job_token import are_task_tickets
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, LOOKUP, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.shard.buffers import BufferPool, sum_of_squares
from nfdt.shard.building import Store
from nfdt.shard.held_state import KeptWeights
from nfdt.shard.messages import DeltaRequest, Gradient, Reply, ReplyHistory

logger = logging.getLogger(__name__)

MAX_NAME = 200
MAX_ERROR = 4000  # characters
LEAST_PARTS, PARTS_PER_WORKER = 16, 4  # of a round whose batches are sized by speed, with bounds: it may have some more
ROUNDING = 1e-5
MOST_NAMED = 4  # tasks in a message
MOST_DENOMINATOR = 1e20  # gradients of usual length remain finite times this
BLOCKS = 4  # of a codec, received before the next step of decoding: 512 KiB of float32, which stay in cache
MOST_TASKS = 1024  # of a push; one has several with local_steps only


@dataclass(frozen=True)
class Terms:
    """Limits for the frames of one job; other requests from the network are errors or attacks.

    Attributes:
        rounds: Whether every push is a part of a synchronous round; otherwise none is.
        most_parts: Largest number of parts of a round.
        most_rate: Largest learning-rate factor; 1: only a factor of 1.
        overlap: Number of requests that may be unanswered while another one is sent.
        key: Key of the tickets that pushes present; empty: no tasks are leased, and pushes need no tickets.
    """

    rounds: bool
    most_parts: int
    most_rate: float
    overlap: int
    key: bytes = b""
    _newest: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, algorithm: AlgorithmSpec, workers: int, key: str = "") -> Terms:
        """Return the terms of a job with this number of workers; their relative batch sizes sum to that number."""
        grouped = algorithm.topology_facts.grouped or algorithm.plan == "topology"
        cut = algorithm.batch_facts.follows_speed
        most_parts = max(LEAST_PARTS, PARTS_PER_WORKER * workers) if cut else workers
        most_rate = workers * (1 + ROUNDING) if cut or grouped else 1.0
        return cls(algorithm.consistency_facts.synchronous, most_parts, most_rate, algorithm.overlap, key.encode())

    def check_order(self, worker: str, sequence: int, before: int | None) -> None:
        """Raise ProtocolError unless the request follows the one ``before`` it on its stream.

        A stream that replaces a broken one begins with the first unanswered request, or after it.
        """
        newest = self._newest.get(worker, 0)
        least, most = (1, newest + self.overlap + 2) if before is None else (before + 1, before + 1)
        if not least <= sequence <= most:
            raise ProtocolError(
                f"Request of worker {worker}: expected number {least if least == most else f'{least} to {most}'}, as "
                f"its requests are numbered in order. Received: {sequence}."
            )
        self._newest[worker] = max(newest, sequence)

    def check_push(self, worker: str, push: Frame, closed_round: int) -> None:
        """Raise ProtocolError unless the job allows the push; ``closed_round`` is the newest round that was applied."""
        if not self.rounds and (push.round or push.part or push.parts > 1):
            raise ProtocolError(
                f"Push from worker {worker}: expected an asynchronous one, as the job has no rounds. Received: part "
                f"{push.part} of {push.parts}, round {push.round}."
            )
        if self.rounds and not (0 < push.round <= closed_round + 1 and 0 < push.parts <= self.most_parts):
            raise ProtocolError(
                f"Push from worker {worker}: expected a part of round {closed_round + 1}, which has at most "
                f"{self.most_parts} parts. Received: part {push.part} of {push.parts}, round {push.round}."
            )
        if not (0.0 <= push.denominator <= MOST_DENOMINATOR or push.denominator == math.inf):
            raise ProtocolError(
                f"Push from worker {worker}: expected a denominator of at most {MOST_DENOMINATOR:g}, infinity for a "
                f"sum, or 0 for the number of samples. Received: {push.denominator}."
            )
        rate = push.rate or 1.0
        if not (rate == 1.0 or (math.isfinite(rate) and 0.0 < rate <= self.most_rate and self.most_rate > 1.0)):
            allowed = f"above 0, at most {self.most_rate:g}" if self.most_rate > 1.0 else "of 1"
            raise ProtocolError(
                f"Push from worker {worker}: expected a factor of the learning rate {allowed}. Received: {rate}."
            )
        if self.key:
            self._check_tickets(worker, push)

    def _check_tickets(self, worker: str, push: Frame) -> None:
        """Raise ProtocolError unless the tasks of the push were leased to the worker."""
        if len(push.tasks) > MOST_TASKS or not are_task_tickets(
            push.tickets, self.key, worker.encode(), push.tasks, push.round, push.part
        ):
            tasks = ", ".join(map(str, push.tasks[:MOST_NAMED])) or "none"
            raise ProtocolError(
                f"Push from worker {worker}: expected the gradient of tasks that are leased to it, with their tickets. "
                f"Received: tasks {tasks}, and {len(push.tickets)} bytes of tickets. Ask the job server for work, and "
                "push the tasks that it leases."
            )


class WorkerExchange:
    """Server of one worker's requests.

    Args:
        store: Store of the shard.
        buffers: Buffers for gradients that arrive on the stream or are decoded.
        encoders: Codecs for deltas of weights, by name.
        terms: Requests that the job allows.
        worker: Name of the worker.
        kept: Weights that are kept from the end of an epoch.
    """

    def __init__(
        self,
        store: Store,
        buffers: BufferPool,
        encoders: Mapping[str, Codec],
        terms: Terms,
        worker: str,
        kept: KeptWeights,
    ) -> None:
        self._store, self._kept = store, kept
        self._buffers = buffers
        self._encoders = encoders
        self._terms, self._worker = terms, worker
        self._history = ReplyHistory()
        self._complete_at = 0.0  # arrival of the last byte of the request
        self._segment: shared_memory.Segment | None = None
        self._updates: ThreadPoolExecutor | None = None
        self._update: Future[None] | None = None  # of the request that is served

    def serve(self, stream: FrameStream) -> None:
        """Answer every push, pull and lookup; the first error is sent to the worker and ends the stream.

        Raises:
            OSError: the connection to the worker is lost, or stalled in the middle of a frame.
        """
        sequence, before = 0, None
        try:
            while (header := stream.receive_header(patiently=True)) is not None:
                sequence = header.sequence
                self._check_name(header)
                if header.kind == OFFER:
                    stream.send(self._accept(header))
                    continue
                self._terms.check_order(self._worker, sequence, before)
                before = sequence
                if header.kind == LOOKUP:
                    self._send_rows(header, stream)
                else:
                    self._serve(header, stream)
        except EOFError as error:
            self._refuse(stream, sequence, ProtocolError(str(error)))
        except NfdtError as error:
            self._refuse(stream, sequence, error)
        except OSError:
            raise
        except Exception as error:  # an error in this code or the user's: the worker receives it, too
            logger.exception("A request of %s failed", self._worker)
            self._refuse(stream, sequence, ProtocolError(f"It failed on the shard: {type(error).__name__}: {error}"))
        finally:
            if self._updates is not None:
                self._updates.shutdown()

    @staticmethod
    def _refuse(stream: FrameStream, sequence: int, error: NfdtError) -> None:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        stream.send(Frame(kind=ERROR, sequence=sequence, error=text))
        stream.end()

    def _check_name(self, header: Frame) -> None:
        if header.worker and header.worker != self._worker:
            raise ProtocolError(
                f"Stream of {self._worker}: expected this worker's name, as its ticket says. "
                f"Received: {header.worker[:MAX_NAME]!r}."
            )

    def _accept(self, offer: Frame) -> Frame:
        """Map the memory that the worker offers; if that fails the stream continues without it."""
        try:
            self._segment = shared_memory.accept(offer, self._store.reply_size * 4, pairs=self._store.overlap + 1)
        except OSError as error:  # includes Refused
            logger.info("Gradients of %s come over the stream. %s", self._worker, error)
            return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=False, error=str(error))
        return Frame(kind=ACKNOWLEDGE, sequence=offer.sequence, applied=True)

    def _serve(self, header: Frame, stream: FrameStream) -> None:
        """Answer a push or pull; its update has ended when this returns or raises."""
        try:
            self._answer(stream, header.sequence, self._reply(header, stream), kept=header.kept)
        finally:
            if self._update is not None:
                self._update.result()
                self._update = None

    def _reply(self, header: Frame, stream: FrameStream) -> Reply:
        self._complete_at = time.perf_counter()
        if header.kind == PULL and header.kept:
            return Reply(self._store.version, self._kept.read())
        if header.kind == PULL:
            delta = self._delta_request(header)
            return self._store.pull(self._worker, sequence=header.sequence, min_version=header.version, delta=delta)
        if header.kind != PUSH:
            raise ProtocolError(f"Stream of {self._worker}: expected a push, pull or lookup. Received: {header.kind}.")
        self._terms.check_push(self._worker, header, self._store.closed_round)
        codec = find_decoder(header.codec)
        codec.check(header.total_bytes, self._store.size)
        if codec is ROWS:  # the store decodes rows itself
            return self._push(header, self._encoded(header, stream))
        if header.shared and codec is IDENTITY:  # applied in the worker's shared memory, which is read until the reply
            return self._push(header, self._shared(header))
        with ExitStack() as lent:
            buffer, length = lent.enter_context(self._buffers.lend()), None
            if codec.block and not header.shared:
                length = self._receive(stream, codec, buffer)
            else:
                codec.decode(self._encoded(header, stream), buffer)
            return self._push(header, buffer, length, lent)

    def _send_rows(self, header: Frame, stream: FrameStream) -> None:
        """Answer a lookup, always on the stream: the areas of shared memory may hold weights that are in use."""
        if header.total_bytes > 8 * self._store.size:  # a number for each row, and how many there are of each table
            raise ShapeMismatch(
                f"Lookup by {self._worker}: expected at most {8 * self._store.size} bytes. Received: "
                f"{header.total_bytes}. The worker runs another model; restart it."
            )
        numbers = np.empty(header.total_bytes, np.uint8)
        stream.receive_into(numbers)
        received_at = time.perf_counter()
        rows = self._store.lookup(self._worker, numbers, header.computed_on)
        content: Any = rows.weights
        served_us = int((time.perf_counter() - received_at) * 1e6)
        answer = {"version": rows.version, "total_bytes": content.nbytes, "served_us": served_us}
        stream.send(Frame(kind=WEIGHTS, sequence=header.sequence, **answer), content)

    def _encoded(self, header: Frame, stream: FrameStream) -> Any:
        """Return the encoded gradient of a push."""
        if not header.shared:
            encoded = np.empty(header.total_bytes, np.uint8)
            stream.receive_into(encoded)
            self._complete_at = time.perf_counter()
            return encoded
        encoded = self._shared(header).view(np.uint8)[: header.total_bytes]
        find_decoder(header.codec).check(encoded.size, self._store.size)  # the area may be shorter than it claims
        return encoded

    def _shared(self, header: Frame) -> Any:
        if self._segment is None:
            raise ProtocolError(
                f"Push {header.sequence} from {self._worker}: expected its gradient on the stream, because no segment "
                "is mapped. Received: none."
            )
        return self._segment.gradient(header.sequence)

    def _receive(self, stream: FrameStream, codec: Codec, buffer: Any) -> float:
        """Receive a gradient; decode it and sum its squares while the rest arrives. Return its Euclidean norm."""
        squares = 0.0
        for part, coded in codec.blocks(buffer.size, BLOCKS):
            values = buffer[part]
            if codec is IDENTITY:
                stream.receive_into(values)
            else:
                encoded = np.empty(coded.stop - coded.start, np.uint8)
                stream.receive_into(encoded)
                codec.decode(encoded, values)
            squares += sum_of_squares(values)
        self._complete_at = time.perf_counter()
        return math.sqrt(squares)

    def _push(self, header: Frame, values: Any, length: float | None = None, lent: ExitStack | None = None) -> Reply:
        gradient = Gradient(
            header.sequence,
            values,
            samples=max(header.samples, 1),  # a field that a client leaves out is read as 0
            parts=max(header.parts, 1),
            rate=header.rate or 1.0,
            round=header.round,
            part=header.part,
            computed_on=header.computed_on,
            tasks=tuple(header.tasks),
            denominator=header.denominator,
            length=length,
        )
        delta, start = self._delta_request(header), partial(self._start, lent)
        return self._store.push(self._worker, gradient, want_weights=header.want_weights, delta=delta, start=start)

    def _start(self, lent: ExitStack | None, update: Callable[[], None]) -> None:
        """Run an update in another thread; it takes over the gradient's buffer, if that is ``lent``."""
        taken = lent.pop_all() if lent else ExitStack()

        def run() -> None:
            with taken:
                try:
                    update()
                except Exception:  # the reply's next part, or the next push, raises an error for it
                    logger.exception("A push of %s failed", self._worker)

        try:
            self._updates = self._updates or _running_executor()
        except (RuntimeError, MemoryError):  # a limit on threads or memory, which may be temporary
            run()
        else:
            self._update = self._updates.submit(run)

    def _delta_request(self, header: Frame) -> DeltaRequest | None:
        codec = self._encoders[find_decoder(header.reply_codec).name] if header.reply_codec else None
        return self._history.delta_request(codec)

    def _answer(self, stream: FrameStream, sequence: int, reply: Reply, *, kept: bool) -> None:
        """Send the reply to a push or pull, each part of its weights as soon as it is complete."""
        if kept:
            self._history = ReplyHistory()  # the weights of a reply before are no longer those that the worker holds
        else:
            self._history.add(sequence, reply)
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
        parts = reply.parts() if reply.parts else iter([slice(None)])
        if self._segment and content.nbytes <= self._store.reply_size * 4:
            area = self._segment.weights(sequence).view(content.dtype)[: content.size]
            for part in parts:
                area[part] = content[part]
            header.shared = True
            stream.send(header)
            return
        stream.send(header, content[next(parts)])
        try:
            for part in parts:
                stream.send_more(content[part])
        except NfdtError as error:  # no error fits into the middle of a frame
            raise ConnectionAbortedError(f"a reply could not be completed: {error}") from error


def _running_executor() -> ThreadPoolExecutor:
    """Return an executor whose only thread has been started, so that no later ``submit`` fails to start it."""
    executor = ThreadPoolExecutor(1, "shard-update")
    executor.submit(int)
    return executor
