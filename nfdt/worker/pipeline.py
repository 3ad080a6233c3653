"""Weights on which a worker computes, and its pushes in flight.

With ``overlap`` k, gradient n is computed while up to k earlier pushes are unanswered, on the weights of the newest
reply::

    k = 0   compute 1 | exchange 1 | compute 2 | exchange 2 | ...
    k = 1   compute 1 | compute 2  | compute 3 | ...
                      | exchange 1 | exchange 2 | ...

The next gradient is never computed on the reply to the push just sent. With k = 1 a gradient misses exactly one update
of its own worker; with greater k it misses as many as are made during the exchange.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar, Unpack

from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.transport.base import ParameterClient, PendingPush, Pulled, Pushed, PushOptions, Vector

Tag = TypeVar("Tag")


class ShardsMoved(Exception):
    """An exchange with shards that have been restored elsewhere: its outcome does not count."""


class Pipeline(Generic[Tag]):
    """Pipeline that sends gradients and holds the newest weights. Not thread-safe.

    Args:
        client: Client of the shards, created for an ``overlap``.
    """

    def __init__(self, client: ParameterClient) -> None:
        self._client = client
        self._held: Pulled | None = None
        self._sent: deque[tuple[Tag, PendingPush]] = deque()
        self._taken: list[tuple[Tag, Pushed]] = []  # replies that were taken early

    @property
    def in_flight(self) -> list[Tag]:
        """The tags of the pushes whose replies :meth:`await_replies` has not returned, oldest first."""
        return [tag for tag, _ in (*self._taken, *self._sent)]

    @property
    def newest(self) -> int | None:
        """Sequence number of the newest push whose reply has not been taken."""
        return self._sent[-1][1].sequence if self._sent else None

    @property
    def holds_weights(self) -> bool:
        """Whether :meth:`weights` holds a reply and need not pull."""
        return self._held is not None

    def weights(self, *, exact: bool = False) -> Pulled:
        """Return the weights of the newest reply, or pull them if there is none; they are valid until :meth:`send`.

        ``exact``: pull the weights without loss, whatever the job's codec.
        """
        if self._held is None:
            self._held = self._client.pull(exact=exact)
        return self._held

    def pull_kept(self) -> None:
        """Hold the weights that the shards keep from the end of an epoch, in place of others."""
        self._held = self._client.pull(kept=True)

    def send(self, tag: Tag, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> None:
        """Push a gradient that was computed on :meth:`weights`; ``tag`` is returned with the reply."""
        if self._held is not None:
            options["computed_on"] = self._held.sequence
        self._sent.append((tag, self._client.begin_push(gradient, **options)))

    def await_replies(self, overlap: int) -> list[tuple[Tag, Pushed]]:
        """Wait until at most ``overlap`` pushes are unanswered; return the available replies, oldest first."""
        while len(self._sent) > overlap or (len(self._sent) > 1 and self._sent[0][1].arrived):
            self._take_oldest()
        answers, self._taken = self._taken, []
        return answers

    def take_arrived(self) -> bool:
        """Hold the weights of the replies that have arrived; return whether there are any.

        For a worker that goes on with weights of its own; :meth:`await_replies` returns these replies later.
        """
        before = len(self._taken)
        while self._sent and self._sent[0][1].arrived:
            self._take_oldest()
        return len(self._taken) > before

    def _take_oldest(self) -> None:
        tag, pending = self._sent.popleft()
        pushed = pending.result()
        self._held = None if pushed.weights is None else Pulled(pushed.weights, pushed.versions, pushed.sequence)
        self._taken.append((tag, pushed))

    def discard_weights(self) -> None:
        """Drop the held weights, so that the next ones are pulled. All replies must have been taken."""
        self._held = None

    def drop(self) -> None:
        """Drop the held weights and the pushes in flight, whose replies will not arrive."""
        self._held = None
        self._sent.clear()
        self._taken.clear()
