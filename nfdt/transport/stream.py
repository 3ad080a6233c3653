"""Client of shards behind the network, with one connection to each; requests go to all shards concurrently.

The connection to a shard on the same machine carries headers only; see :mod:`nfdt.core.wire.shared_memory`.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from nfdt.codecs import IDENTITY
from nfdt.codecs.base import Payload
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import RowIndex, Rows, RowVector, encode_numbers
from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire.channel import split_address
from nfdt.core.wire.shards_pb2 import LOOKUP, PULL, PUSH, WEIGHTS, Frame
from nfdt.core.wire.shared_memory import is_this_machine
from nfdt.core.work.patience import Patience
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
from nfdt.transport.choice import CodecChoice, make_choice
from nfdt.transport.coding import Coding, Lookup, RowCoding
from nfdt.transport.emulated_link import EmulatedLink, make_link
from nfdt.transport.link import ShardAnswer, ShardConnector, ShardLink, ShardRequest

TIMEOUT_S = 120.0


class StreamClient:
    """``ParameterClient`` over TCP.

    Args:
        addresses: ``host:port`` of each shard, in order.
        layout: Layout of the whole model.
        worker: Name of this worker, unique among the running workers.
        token: Token of the worker.
        timeout_s: Longest wait for one reply.
        overlap: Number of pushes that may be unanswered while another one is sent; the shards must expect the same.
        share_memory: Exchange gradients and weights through memory with the shards of this machine that agree.
        choice: Choice of codecs; None: gradients and weights are sent unencoded.
        tables: Variables, by index, that the shards hold as tables: gradients may be ``RowVector``, and replies
            ``RowWeights``. ``choice`` is ignored in this case.
        looked_up: Whether the shards alone hold these tables: replies have the other weights, shape ``(P',)``, and
            :meth:`begin_lookup` requests rows.
        emulated: Delays requests and replies.
        patience: Time to search for a shard that cannot be reached; None: one more attempt.
        **security: ``ca_file``, ``cert_file``, ``key_file``, ``insecure`` of
            :func:`nfdt.core.wire.channel.open_channel`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        layout: ParameterLayout,
        worker: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        overlap: int = 0,
        share_memory: bool = True,
        choice: CodecChoice | None = None,
        tables: Sequence[int] = (),
        looked_up: bool = False,
        emulated: EmulatedLink | None = None,
        patience: Patience | None = None,
        **security: Any,
    ) -> None:
        self._bounds = shard_bounds(layout, len(addresses))
        self._coding: Coding | RowCoding | None = Coding(choice, self._bounds) if choice else None
        if tables:
            self._coding = coding = RowCoding(layout, tables, len(addresses), looked_up=looked_up)
            self._bounds = coding.bounds
        # One more with codecs, as a delta is added to the weights of the reply before.
        buffers, size = overlap + (2 if choice else 1), self._bounds[-1].stop
        self._buffers = [np.empty(size, np.float32) for _ in range(buffers)]
        self._joined: list[Vector] = []  # gradients that came in pieces
        self._overlap = overlap
        self._worker = worker
        self._sequence = 0
        self._answers_wanted = 0  # selects the buffers in turn
        self._newest = 0
        self._asked: deque[tuple[Vector, list[ShardRequest]]] = deque()  # buffer for the weights, and the requests
        self._lookups: dict[int, Lookup] = {}  # by sequence, those without an answer
        self._answered_at = 0.0
        self._pushes = InFlight(overlap, self._take, lambda count: all(link.arrived(count) for link in self._links))
        self._links = [
            ShardLink(
                ShardConnector(address, token, timeout_s, **security),
                timeout_s,
                overlap=overlap,
                shared_bytes=4 * (bound.stop - bound.start)
                if share_memory and is_this_machine(split_address(address)[0])
                else 0,
                emulated=emulated,
                patience=patience,
                # A lookup follows a push whose answer has not been read: without threads, both ends might only send.
                threads=overlap > 0 or len(addresses) > 1 or looked_up,
            )
            for address, bound in zip(addresses, self._bounds, strict=True)
        ]

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent to all shards, in frames and through shared memory."""
        return sum(link.bytes_moved[0] for link in self._links)

    @property
    def bytes_received(self) -> int:
        """Number of bytes received from all shards, in frames and through shared memory."""
        return sum(link.bytes_moved[1] for link in self._links)

    @property
    def codecs(self) -> Mapping[str, Any]:
        """Report of the codecs in use, ready for JSON; empty if nothing is encoded."""
        return self._coding.report() if self._coding else {}

    def pull(self, min_version: int = 0, *, exact: bool = True, kept: bool = False) -> Pulled:
        """Return the current weights, at ``min_version`` or later on every shard; or those that the shards keep.

        Raises:
            ServerUnreachable: a shard is unreachable or does not answer; the message names its address.
            UsageError: a push has not been answered yet.
        """
        self._pushes.check_pull()
        header = Frame(kind=PULL, version=min_version, kept=kept)
        self._ask(header, [np.empty(0, np.uint8)] * len(self._links), exact=exact)
        weights, headers, _ = self._answers(self._sequence)
        self._newest = self._sequence
        return Pulled(weights, tuple(header.version for header in headers), self._sequence)

    def begin_push(
        self, gradient: Vector | Pieces | RowVector, **options: Unpack[PushOptions]
    ) -> InFlightRequest[Pushed]:
        """Send a gradient; it is applied at most once even if a stream breaks and the push is sent again.

        Raises:
            ServerUnreachable: a shard is unreachable; the message names its address.
            ShapeMismatch: the gradient has another size.
            UsageError: too many pushes have not been answered yet.
        """
        self._pushes.check_push()
        fields: dict[str, Any] = {"computed_on": self._newest, "parts": 1, "want_weights": True, **options}
        compute_s = fields.pop("compute_s", 0.0)
        payloads = self._encoded(self._join(gradient) if isinstance(gradient, Pieces) else gradient, compute_s)
        header = Frame(kind=PUSH, **fields)
        if self._coding and self._coding.push_codec is not IDENTITY:
            header.codec = self._coding.push_codec.name
        self._ask(header, payloads, exact=not fields["want_weights"])
        return self._pushes.add(self._sequence)

    def begin_lookup(self, numbers: Sequence[RowIndex], computed_on: int) -> InFlightRequest[tuple[Rows, ...]]:
        """Request rows of the tables, ascending numbers of each, at the moment of the reply ``computed_on``.

        Raises:
            UsageError: this client was not made for tables that the shards alone hold.
        """
        if not isinstance(self._coding, RowCoding) or not self._coding.looked_up:
            raise UsageError("Lookup: expected a client of tables that shards alone hold. Received: another one.")
        lookup = self._coding.lookup(numbers)
        payloads = [encode_numbers(part) for part in lookup.parts]
        self._send(Frame(kind=LOOKUP, computed_on=computed_on), payloads, lookup.values, lookup.bounds)
        self._lookups[self._sequence] = lookup
        return self._pushes.add(self._sequence, is_push=False)

    def _join(self, gradient: Pieces) -> Vector:
        """Return a gradient as a vector, where possible in memory that the shard reads."""
        size = self._bounds[-1].stop
        if gradient.entry.shape != (size,):
            raise ShapeMismatch(f"Gradient: expected shape ({size},). Received: {gradient.entry.shape}.")
        area = self._links[0].gradient_area(self._sequence + 1) if len(self._links) == 1 and not self._coding else None
        if area is None:
            # Those of pushes without an answer are still in use; the oldest one is not.
            free = len(self._joined) > self._overlap
            self._joined.append(self._joined.pop(0) if free else np.empty(size, np.float32))
            area = self._joined[-1]
        gradient.write_to(area)
        return area

    def _encoded(self, gradient: Any, compute_s: float) -> list[Payload]:
        if not isinstance(self._coding, RowCoding):
            check_gradient(gradient, self._bounds)
        if self._coding:
            return self._coding.encode(gradient, compute_s)
        whole = np.ascontiguousarray(gradient)
        return [IDENTITY.encode(whole[bound]) for bound in self._bounds]

    def push(self, gradient: Vector | Pieces | RowVector, **options: Unpack[PushOptions]) -> Pushed:
        """Send a gradient and wait for the reply.

        Raises:
            ServerUnreachable: a shard is unreachable or does not answer; the message names its address.
            ShapeMismatch: the gradient has another size.
        """
        return self.begin_push(gradient, **options).result()

    def interrupt(self) -> None:
        """End an exchange that waits in another thread, and every later one, with an error; close it afterwards."""
        for link in self._links:
            link.interrupt()

    def close(self) -> None:
        """Disconnect from all shards."""
        for link in self._links:
            link.close()

    def _ask(self, header: Frame, payloads: Sequence[Payload], *, exact: bool) -> None:
        if self._coding and self._coding.reply_codec and not exact:
            header.reply_codec = self._coding.reply_codec.name
        weights = self._buffers[self._answers_wanted % len(self._buffers)]
        self._answers_wanted += header.kind == PULL or header.want_weights
        self._send(header, payloads, weights, self._bounds)

    def _send(self, header: Frame, payloads: Sequence[Payload], weights: Vector, bounds: Sequence[slice]) -> None:
        """Send a request to each shard; its reply is written to ``weights`` within ``bounds``."""
        self._sequence += 1
        header.sequence, header.worker = self._sequence, self._worker
        requests = [
            ShardRequest(header, _bytes(payload), _bytes(weights[bound]))
            for payload, bound in zip(payloads, bounds, strict=True)
        ]
        self._asked.append((weights, requests))
        for link, request in zip(self._links, requests, strict=True):
            link.ask(request)

    def _take(self, sequence: int) -> Pushed | tuple[Rows, ...]:
        """Return the reply to the oldest request, a push or a lookup."""
        if (lookup := self._lookups.pop(sequence, None)) is not None:
            self._wait(sequence)
            return lookup.rows()
        weights, headers, seconds = self._answers(sequence)
        sent = all(header.kind == WEIGHTS for header in headers)
        if sent:
            self._newest = sequence
        return Pushed.of(weights if sent else None, headers, sequence, seconds)

    def _answers(self, sequence: int) -> tuple[Any, list[Frame], float]:
        """Wait for the shards' replies to the oldest request; return the joined weights, the headers, and seconds."""
        weights, requests, answers = self._wait(sequence)
        headers = [answer.header for answer in answers]
        seconds = max(answer.arrived_at for answer in answers) - requests[0].asked_at
        if self._coding:
            self._measure(self._coding, requests, answers)
            if not all(answer.has_weights for answer in answers):
                return weights, headers, seconds
            parts = [answer.delta or answer.shared for answer in answers]
            return self._coding.decode(sequence, parts, weights), headers, seconds
        if len(answers) == 1 and answers[0].shared is not None:
            return answers[0].shared, headers, seconds
        for answer, bound in zip(answers, self._bounds, strict=True):
            if answer.shared is not None:
                np.copyto(weights[bound], answer.shared)
        return weights, headers, seconds

    def _wait(self, sequence: int) -> tuple[Vector, list[ShardRequest], list[ShardAnswer]]:
        """Wait for the shards' replies to the oldest request."""
        weights, requests = self._asked.popleft()
        try:
            return weights, requests, [link.wait(sequence) for link in self._links]
        except BaseException:  # an abandoned stream may still write into the old ones
            self._buffers = [np.empty_like(buffer) for buffer in self._buffers]
            raise

    def _measure(
        self, coding: Coding | RowCoding, requests: Sequence[ShardRequest], answers: Sequence[ShardAnswer]
    ) -> None:
        """Measure the time of an exchange, except for the first one, which includes connecting.

        If pushes overlap, the time of a push counts from the previous reply.
        """
        before = self._answered_at
        self._answered_at = max(answer.arrived_at for answer in answers)
        if not before:
            return
        seconds = self._answered_at - max(requests[0].asked_at, before)
        served_s = max(answer.header.served_us for answer in answers) / 1e6
        sent_bytes = sum(request.payload.nbytes for request in requests)
        received_bytes = sum(answer.payload_bytes for answer in answers)
        coding.exchanged(sent_bytes, received_bytes, max(0.0, seconds - served_s))


def _bytes(vector: npt.NDArray[Any]) -> memoryview:
    return vector.data.cast("B") if vector.size else memoryview(bytearray())


def shard_connector(
    spec: JobSpec, layout: ParameterLayout, worker: str, number: int, stopped: threading.Event, **options: Any
) -> Callable[..., StreamClient]:
    """Return a function that connects a worker of a job to shards, with their addresses and the other arguments.

    All its clients share the worker's choice of codecs and its emulated link.

    Args:
        spec: The job.
        layout: Layout of the whole model.
        worker: Name of the worker.
        number: Number of the worker, which selects its emulated link.
        stopped: Event that is set when the job is over.
        **options: More arguments of :class:`StreamClient`.
    """
    return functools.partial(
        StreamClient,
        layout=layout,
        worker=worker,
        timeout_s=spec.step_timeout_s,
        choice=make_choice(spec.algorithm, layout.size),
        emulated=make_link(spec.cluster.emulate, number, stopped),
        **options,
    )
