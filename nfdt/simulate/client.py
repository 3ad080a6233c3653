"""The client of a simulated worker: in process, but pushes and replies take virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.shard.in_process import InProcessClient, Leaving, reply_bytes
from nfdt.shard.store import ShardStore
from nfdt.simulate.events import Activity, ActivitySteps, Agenda, Signal
from nfdt.simulate.machines import Road, VirtualNetwork
from nfdt.transport.base import InFlight, InFlightPush, Pushed, PushOptions, Vector
from nfdt.transport.choice import CodecChoice


@dataclass(frozen=True)
class Way:
    """Path between one worker and the shards.

    Attributes:
        agenda: The virtual clock and its events.
        network: Network with the shards at its end.
        up: Direction to the shards.
        down: Direction back to the worker.
    """

    agenda: Agenda
    network: VirtualNetwork
    up: Road
    down: Road


class VirtualClient(InProcessClient):
    """An :class:`InProcessClient` whose pushes and replies arrive after their virtual time.

    A push reaches all shards at the same time, when its last part has arrived. The result of a push may be taken only
    once :attr:`unanswered` no longer counts it, because this client cannot wait.

    Args:
        stores: One store per shard, in order.
        layout: Layout of the whole model.
        worker: This worker's name.
        way: Path to the shards.
        overlap: Maximum number of unanswered pushes while another one is sent.
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
        """Number of pushes whose replies have not arrived."""
        return self._sent - self._arrived

    def answer(self) -> Signal:
        """Return a signal that fires when the next reply arrives."""
        self._arrival = Signal(self._way.agenda)
        return self._arrival

    def signal(self) -> Signal:
        """Return a new signal on the virtual clock."""
        return Signal(self._way.agenda)

    def start(self, steps: ActivitySteps) -> None:
        """Run an activity beside the worker's own."""
        Activity(self._way.agenda, steps)

    def travel(self) -> ActivitySteps:
        """Wait while an empty request travels to the shards."""
        yield self._way.up.send(self._now, [0] * len(self._stores)) - self._now

    def come_back(self, size: int) -> ActivitySteps:
        """Wait while a reply of ``size`` bytes travels back."""
        yield self._way.down.send(self._now, self._split(size)) - self._now

    def lose(self) -> None:
        """Mark the worker as gone; its pushes and replies in flight are lost."""
        self._alive = False

    def begin_push(self, gradient: Vector, **options: Unpack[PushOptions]) -> InFlightPush:
        """Begin a push as ``ParameterClient`` does; it is sent now."""
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
        """Split the bytes of a reply over the shards in proportion to their weights."""
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
