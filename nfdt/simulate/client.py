"""The client of a simulated worker: in process, but pushes and answers take their virtual time on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.shard.in_process import InProcessClient, Leaving, reply_bytes
from nfdt.shard.store import ShardStore
from nfdt.simulate.events import ActivitySteps, Agenda, Signal
from nfdt.simulate.machines import Road, VirtualNetwork
from nfdt.transport.base import Pushed, PushOptions, Vector
from nfdt.transport.choice import CodecChoice
from nfdt.transport.in_flight import InFlight, InFlightPush


@dataclass(frozen=True)
class Way:
    """Between one worker and the shards.

    Attributes:
        agenda: The virtual clock.
        network: The shards at its end.
        up: To them.
        down: Back.
    """

    agenda: Agenda
    network: VirtualNetwork
    up: Road
    down: Road


class VirtualClient(InProcessClient):
    """An :class:`InProcessClient` whose pushes reach the shards later, and whose answers later still.

    A push reaches all shards at one moment, when its last part has arrived. The result of a push must not be asked for
    before :attr:`unanswered` includes it: nothing here can wait.

    Args:
        stores: One per shard, in order.
        layout: Layout of the whole model.
        worker: This worker's name.
        way: To the shards.
        overlap: How many pushes may be unanswered while another one is sent.
        choice: Choice of codecs; None: nothing is encoded.
    """

    def __init__(
        self,
        stores: Sequence[ShardStore],
        layout: ParameterLayout,
        worker: str,
        way: Way,
        *,
        overlap: int = 0,
        choice: CodecChoice | None = None,
    ) -> None:
        super().__init__(stores, layout, worker, overlap=overlap, choice=choice)
        self._way, self._alive = way, True
        self._sent = self._arrived = self._taken = 0
        self._pushes = InFlight(overlap, self._take, lambda count: self._arrived - self._taken >= count)
        self._arrival: Signal | None = None

    @property
    def unanswered(self) -> int:
        """Pushes whose answers are still on their way."""
        return self._sent - self._arrived

    def answer(self) -> Signal:
        """Fires when the next answer arrives."""
        self._arrival = Signal(self._way.agenda)
        return self._arrival

    def travel(self) -> ActivitySteps:
        """The way of a request without content to the shards."""
        yield self._way.up.send(self._now, [0] * len(self._stores)) - self._now

    def come_back(self, size: int) -> ActivitySteps:
        """The way of an answer of so many bytes back."""
        yield self._way.down.send(self._now, self._split(size)) - self._now

    def lose(self) -> None:
        """The worker is gone: what it has sent and what it would receive is lost on the way."""
        self._alive = False

    def begin_push(self, gradient: Vector, **options: Unpack[PushOptions]) -> InFlightPush:
        """See ``ParameterClient``; the push leaves now."""
        leaving = self._leave(gradient, options)
        sent_at, agenda = self._now, self._way.agenda
        self._sent += 1
        arrives = self._way.up.send(sent_at, leaving.sizes)
        agenda.at(arrives, lambda: agenda.at(self._way.network.applied(arrives), lambda: self._apply(leaving, sent_at)))
        return self._pushes.add(leaving.sequence)

    @property
    def _now(self) -> float:
        return self._way.agenda.clock.now()

    def _split(self, size: int) -> list[int]:
        """Bytes of an answer by shard, in proportion to their weights."""
        total = self._bounds[-1].stop
        return [size * (bound.stop - bound.start) // total for bound in self._bounds]

    def _apply(self, leaving: Leaving, sent_at: float) -> None:
        if not self._alive:
            return
        replies = self._deliver(leaving)
        size = sum(map(reply_bytes, replies))
        arrives = self._way.down.send(self._now, [reply_bytes(reply) for reply in replies])
        took = arrives - sent_at - self._way.network.apply_s
        self._way.agenda.at(arrives, lambda: self._answered(sum(leaving.sizes), size, took))

    def _answered(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        self._arrived += 1
        if self._coding is not None:
            self._coding.exchanged(sent_bytes, received_bytes, seconds)
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.fire()

    def _take(self, sequence: int) -> Pushed:
        self._taken += 1
        return super()._take(sequence)
