"""Client of a worker's shards that moves to other shards when all of them have been restored from a snapshot.

A move is announced from any thread and ends an exchange with the old shards at once.
The worker's thread then drops its work and moves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Unpack

from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import RowIndex
from nfdt.core.errors import AuthenticationFailed
from nfdt.core.work import instructions as ins
from nfdt.core.work.patience import Patience
from nfdt.transport.base import (
    ParameterClient,
    PendingPush,
    PendingRows,
    Pulled,
    Pushed,
    PushOptions,
    Vector,
)
from nfdt.worker.pipeline import ShardsMoved


class InterruptibleClient(ParameterClient, Protocol):
    """Client whose exchange another thread may end, and which may look up rows of tables."""

    def begin_lookup(self, numbers: Sequence[RowIndex], computed_on: int) -> PendingRows:
        """Request rows of the tables; only a client of shards that hold the tables for the workers can.

        Args:
            numbers: Row numbers of each table, ascending, without repetition.
            computed_on: ``sequence`` of the reply of whose moment the rows are, or of a push that is on its way.
        """
        ...

    def interrupt(self) -> None:
        """End an exchange that waits in another thread, and every later one, with an error."""
        ...


class ShardMoves:
    """Newest announcement of where the shards of a job serve. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: ins.MoveShards | None = None
        self._interrupt: Callable[[], None] | None = None

    def announce(self, move: ins.MoveShards) -> None:
        """Announce the shards of an incarnation, and interrupt exchanges with older ones; an old one is ignored."""
        with self._lock:
            if self._newest is not None and move.incarnation <= self._newest.incarnation:
                return
            self._newest, interrupt = move, self._interrupt
        if interrupt is not None:
            interrupt()

    @property
    def newest(self) -> ins.MoveShards:
        """The shards to use.

        Raises:
            LookupError: nothing has been announced.
        """
        if self._newest is None:
            raise LookupError("Shards: expected an announcement first. Received: none.")
        return self._newest

    def call_on_move(self, interrupt: Callable[[], None]) -> None:
        """Call a function after each announcement from now on, on the announcing thread."""
        with self._lock:
            self._interrupt = interrupt


class MovableClient:
    """``ParameterClient`` of the shards announced last; an exchange with older ones raises :class:`ShardsMoved`.

    Residuals of codecs are lost with a move, like the pushes in flight: they belong to gradients made after the
    snapshot.

    Args:
        moves: Announcements; there has been one.
        connect: Returns a client of some shards.
        make_patience: Returns the time limit for an announcement after shards have refused the worker's token.

    Attributes:
        incarnation: Incarnation of the shards in use.
    """

    def __init__(
        self,
        moves: ShardMoves,
        connect: Callable[[ins.MoveShards], InterruptibleClient],
        make_patience: Callable[[], Patience],
    ) -> None:
        self._moves, self._connect, self._make_patience = moves, connect, make_patience
        self._sent = self._received = 0  # bytes, with earlier shards
        self._codecs: Mapping[str, Any] = {}
        newest = moves.newest
        self._client, self.incarnation = connect(newest), newest.incarnation
        moves.call_on_move(lambda: self._client.interrupt())

    @property
    def announced(self) -> bool:
        """Whether newer shards than those in use have been announced."""
        return self._moves.newest.incarnation > self.incarnation

    def announce(self, move: ins.MoveShards) -> None:
        """See :meth:`ShardMoves.announce`."""
        self._moves.announce(move)

    def move(self) -> None:
        """Connect to the shards announced last, where push sequences start again; does nothing if they are in use."""
        newest = self._moves.newest
        if newest.incarnation <= self.incarnation:
            return
        self._client.close()
        self._sent, self._received, self._codecs = self.bytes_sent, self.bytes_received, self.codecs
        self._client, self.incarnation = self._connect(newest), newest.incarnation
        if self.announced:  # meanwhile: the announcement has interrupted the client before this one
            self._client.interrupt()

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent, to earlier shards too."""
        return self._sent + self._client.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Number of bytes received, from earlier shards too."""
        return self._received + self._client.bytes_received

    @property
    def codecs(self) -> Mapping[str, Any]:
        """See ``ParameterClient``; messages and bytes include those with earlier shards."""
        return _added(self._codecs, self._client.codecs)

    def pull(self, min_version: int = 0, *, exact: bool = True, kept: bool = False) -> Pulled:
        """See ``ParameterClient``.

        Raises:
            ShardsMoved: the shards have moved.
        """
        with self.exchange():
            return self._client.pull(min_version, exact=exact, kept=kept)

    def begin_push(self, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> PendingPush:
        """See ``ParameterClient``.

        Raises:
            ShardsMoved: the shards have moved; the reply raises it, too.
        """
        with self.exchange():
            return _Movable(self._client.begin_push(gradient, **options), self)

    def push(self, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> Pushed:
        """See ``ParameterClient``; raises the errors of :meth:`begin_push`."""
        return self.begin_push(gradient, **options).result()

    def begin_lookup(self, numbers: Sequence[RowIndex], computed_on: int) -> PendingRows:
        """See ``InterruptibleClient``; raises the errors of :meth:`begin_push`."""
        with self.exchange():
            return _Movable(self._client.begin_lookup(numbers, computed_on), self)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Convert an error of the shards into :class:`ShardsMoved` if that is its reason.

        A refused token is one of a newer incarnation that serves at the same address: its announcement follows.
        """
        try:
            yield
        except Exception as error:
            if self.announced or (isinstance(error, AuthenticationFailed) and self._await_announcement()):
                raise ShardsMoved(f"The shards have moved: {error}") from error
            raise

    def _await_announcement(self) -> bool:
        patience = self._make_patience()
        while not self.announced:
            if not patience.failure():
                return False
        return True


class _Movable:
    """Request to shards that may move before they answer."""

    def __init__(self, request: Any, client: MovableClient) -> None:
        self._request, self._client = request, client

    @property
    def sequence(self) -> int:
        """See ``PendingPush``."""
        return int(self._request.sequence)

    @property
    def arrived(self) -> bool:
        """See ``PendingPush``."""
        return bool(self._request.arrived)

    def result(self) -> Any:
        """See ``PendingPush``."""
        with self._client.exchange():
            return self._request.result()


def _added(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newer report of codecs, with the messages and bytes of both."""
    uses = {direction: dict(earlier[direction]) for direction in ("push", "reply") if direction in earlier}
    for direction, codecs in uses.items():
        for codec, counts in now[direction].items():
            before = codecs.get(codec, {})
            codecs[codec] = {name: before.get(name, 0) + count for name, count in counts.items()}
    return {**now, **uses}
