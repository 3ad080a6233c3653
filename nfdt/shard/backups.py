"""What one worker may hold: the weights of the answers that its next gradient can have been computed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nfdt.core.errors import ProtocolError


@dataclass(frozen=True)
class Backup:
    """The record of the weights a worker got, the shard's version then, and the staleness of the push they answered.

    ``weights`` are a vector, a :class:`~nfdt.shard.tensors.Half`, or None; see :mod:`nfdt.shard.backup_formats`.
    """

    weights: Any
    version: int
    staleness: int = 0


class Backups:
    """The newest ``size`` answers to one worker, by the sequence number of its request.

    A worker that has ``size - 1`` unanswered pushes while it computes uses one of these, and never an older one than
    before: what is older is dropped.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_sequence: dict[int, Backup] = {}  # oldest first

    def add(self, sequence: int, backup: Backup) -> None:
        """The request ``sequence`` is answered with this; 0: it has no number, and nothing else is held any more.

        It takes the place of what the request was answered with before. A first answer out of order reaches nobody and
        is not kept.
        """
        if not sequence:
            self._by_sequence.clear()
        if sequence < max(self._by_sequence, default=0) and sequence not in self._by_sequence:
            return
        self._by_sequence[sequence] = backup
        while len(self._by_sequence) > self._size:
            del self._by_sequence[next(iter(self._by_sequence))]

    def get(self, sequence: int) -> Backup | None:
        """The answer to this request, if it has a number and is still kept."""
        return self._by_sequence.get(sequence) if sequence else None

    def used(self, worker: str, sequence: int) -> Backup:
        """The answer that a gradient was computed on, the newest for 0; older ones are dropped.

        Raises:
            ProtocolError: it is not kept; the worker overlaps more than the shard was told.
        """
        sequence = sequence or max(self._by_sequence)
        found = self._by_sequence.get(sequence)
        if found is None:
            raise ProtocolError(
                f"Push from worker {worker}: expected a gradient computed on one of the answers "
                f"{sorted(self._by_sequence)}. Received: on answer {sequence}. Worker and shard must be given the same "
                f"overlap; this shard keeps {self._size}."
            )
        for older in [kept for kept in self._by_sequence if kept < sequence]:
            del self._by_sequence[older]
        return found


@dataclass
class WorkerRecord:
    """What the shard knows of one worker.

    Attributes:
        backups: What it may hold.
        rule: State of the update rule.
        sequence: Of its last push.
        whole: Its next answer must be all weights.
    """

    backups: Backups
    rule: dict[str, Any]
    sequence: int = 0
    whole: bool = False


def known(workers: Mapping[str, WorkerRecord], name: str) -> WorkerRecord:
    """The record of a worker that has pulled.

    Raises:
        ProtocolError: it has not.
    """
    if name not in workers:
        raise ProtocolError(f"Push from worker {name}: expected a pull before the first push. Received: none.")
    return workers[name]
