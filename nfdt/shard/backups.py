"""Backups of one shard: for each worker, the weights that its next gradient may have been computed on.

A backup equals the weights that the worker holds, bit for bit: a shard sends the decoded backup. It is as small as the
update rule and the workers' codecs allow. Three formats::

    none      nothing: the rule does not use the weights that a gradient was computed on           0 bytes per weight
    exact     the weights; replies may then be deltas to the weights that a worker holds          4
    anchored  a bfloat16 difference to an *anchor*, an older snapshot that many backups share     2

An anchored backup differs from the weights it represents by at most 1/256 of their distance to the anchor, which is
far less than one step. Weights in half precision would differ by more than a small step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nfdt.core.errors import ProtocolError
from nfdt.core.sharding.records import RecordTree
from nfdt.core.work.tasks import TaskNumbers
from nfdt.shard.engine import AnchoredBf16, Engine, EngineReply, Vector
from nfdt.shard.messages import DeltaRequest
from nfdt.update_rules.base import RuleState

MAX_NAME = 200

REPLIES_PER_ANCHOR = 4
"""Replies per worker until the anchor is renewed."""


class BackupFormat:
    """Format of the backups of one shard, here the one without backups. Used under the store's lock.

    Attributes:
        has_deltas: Whether a reply may be a delta to a backup.
    """

    has_deltas = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def anchor(self, snapshot: Callable[[], Vector], workers: int) -> Vector | None:
        """Return the anchor of the next reply to one of ``workers``, or None; ``snapshot`` returns current weights."""
        return None

    def renew_anchor(self) -> None:
        """Make a new anchor for the next reply, because the weights have changed a lot."""

    def encode(self, reply: EngineReply) -> Any:
        """Return the backup of weights that are sent: a vector, an :class:`AnchoredBf16`, or None."""
        return None


class ExactBackup(BackupFormat):
    """Format that keeps the weights themselves."""

    has_deltas = True

    def encode(self, reply: EngineReply) -> Any:
        """Return the weights themselves, which nobody changes any more."""
        return reply.weights


class AnchoredBackup(BackupFormat):
    """Format that keeps differences to an anchor, a snapshot of the weights that is renewed periodically."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._anchor: Any = None
        self._replies = 0  # with this anchor
        self._zeros: Any = None

    def anchor(self, snapshot: Callable[[], Vector], workers: int) -> Vector | None:
        """Return the current anchor, or a new one after some replies to each worker."""
        if self._anchor is None or self._replies >= REPLIES_PER_ANCHOR * workers:
            self._anchor, self._replies = snapshot(), 0
        self._replies += 1
        return self._anchor

    def renew_anchor(self) -> None:
        """Drop the anchor, so that the next reply makes a new one."""
        self._anchor = None

    def encode(self, reply: EngineReply) -> Any:
        """Return the compressed form; weights sent without an anchor become their own anchor."""
        if reply.compressed is not None:
            return reply.compressed
        if self._zeros is None:
            self._zeros = self._engine.no_difference()
        return AnchoredBf16(reply.weights, self._zeros)


BACKUP_FORMATS = {"none": BackupFormat, "exact": ExactBackup, "anchored": AnchoredBackup}


@dataclass(frozen=True)
class Backup:
    """Weights that a worker holds.

    Attributes:
        weights: Weights as the shard's format keeps them.
        version: Version of the shard when they were sent.
        staleness: Staleness of the push they answered.
    """

    weights: Any
    version: int
    staleness: int = 0


class WorkerRecord:
    """State that a shard keeps for one worker, with the newest ``size`` replies to it.

    A worker with up to ``size - 1`` unanswered pushes computes on one of these, and never on an older one than before:
    older ones are dropped.

    Attributes:
        rule: State of the update rule.
        sequence: Sequence number of its last push.
        resync: Whether its next reply must be all weights.
    """

    def __init__(self, size: int, rule: RuleState) -> None:
        self.rule, self.sequence, self.resync = rule, 0, False
        self._size = size
        self._replies: dict[int, Backup] = {}  # by the sequence number of the request, oldest first

    def add(self, sequence: int, backup: Backup) -> None:
        """Keep the backup of the reply to request ``sequence``; 0: the request has no number, all others are dropped.

        Replaces an earlier backup of the same request. A first reply out of order reaches no worker and is not kept.
        """
        if not sequence:
            self._replies.clear()
        # The request came on a stream that has been replaced, so that its reply is lost.
        if sequence < max(self._replies, default=0) and sequence not in self._replies:
            return
        self._replies[sequence] = backup
        while len(self._replies) > self._size:
            del self._replies[next(iter(self._replies))]

    def get(self, sequence: int) -> Backup | None:
        """Return the backup of this request, if it has a number and is still kept."""
        return self._replies.get(sequence) if sequence else None

    def used(self, worker: str, sequence: int) -> Backup:
        """Return the backup that a gradient was computed on, the newest for 0; older ones are dropped.

        Raises:
            ProtocolError: the backup is no longer kept; the worker overlaps more pushes than the shard expects.
        """
        sequence = sequence or max(self._replies)
        found = self._replies.get(sequence)
        if found is None:
            raise ProtocolError(
                f"Push from worker {worker}: expected a gradient computed on one of the answers "
                f"{sorted(self._replies)}. Received: on answer {sequence}. Worker and shard must be given the same "
                f"overlap; this shard keeps {self._size}."
            )
        for older in [kept for kept in self._replies if kept < sequence]:
            del self._replies[older]
        return found


class BackupStore:
    """Records of all workers of one shard. Used under the store's lock.

    Args:
        engine: Engine of the shard.
        backup_format: Name in :data:`~nfdt.shard.BACKUP_FORMATS`.
        size: Number of replies kept for each worker.
    """

    def __init__(self, engine: Engine, backup_format: str, size: int) -> None:
        self._engine = engine
        self._format = BACKUP_FORMATS[backup_format](engine)
        self._size = size
        self._workers: dict[str, WorkerRecord] = {}
        self._waiting: dict[str, RuleState] = {}  # from a snapshot, of workers that have not pulled since
        self._gone: set[str] = set()
        self._applied = TaskNumbers()

    def check(self, worker: str) -> None:
        """Raise ProtocolError if the worker has left the job: others have its tasks."""
        if worker in self._gone:
            raise ProtocolError(
                f"Request of worker {worker[:MAX_NAME]}: expected one of a worker of the job. Received: one of a "
                "worker that the job has given up. Others train its tasks; let its process end."
            )

    def count_tasks(self, tasks: Sequence[int]) -> bool:
        """Count tasks as applied; return False if they all are already. Without numbers there is nothing to count."""
        if tasks and all(task in self._applied for task in tasks):
            return False
        for task in tasks:
            self._applied.add(task)
        return True

    def applied_of(self, tasks: Iterable[int]) -> list[int]:
        """Return those of the tasks that are applied."""
        return [task for task in tasks if task in self._applied]

    def known(self, worker: str) -> WorkerRecord:
        """Return the record of a worker that has pulled.

        Raises:
            ProtocolError: the worker has not pulled.
        """
        if worker not in self._workers:
            raise ProtocolError(f"Push from worker {worker}: expected a pull before the first push. Received: none.")
        return self._workers[worker]

    def get(self, worker: str, sequence: int) -> Backup | None:
        """Return the backup of the reply to a request, if it is still kept."""
        record = self._workers.get(worker)
        return record.get(sequence) if record else None

    def base_of(self, worker: str, sequence: int, request: DeltaRequest | None) -> Backup | None:
        """Return the backup that the reply to request ``sequence`` may be a delta to; None for all weights.

        A repeated request, on any stream, is answered with all of the weights of its first reply: a new delta would not
        reproduce them exactly, and the shard cannot determine which of the two replies the worker uses.
        """
        if request is None or not self._format.has_deltas:
            return None
        record = self._workers.get(worker)
        again = record is None or record.resync or record.get(sequence)
        return None if record is None or again else record.get(request.base)

    def add(self, worker: str, sequence: int, reply: EngineReply, version: int, staleness: int) -> None:
        """Keep the backup of a reply that is sent."""
        record = self._workers.get(worker)
        if record is None:
            rule = self._waiting.pop(worker) if worker in self._waiting else self._engine.new_worker()
            record = self._workers[worker] = WorkerRecord(self._size, rule)
        record.resync = False
        record.add(sequence, Backup(self._format.encode(reply), version, staleness))

    def confirm(self, worker: str, sequence: int, backup: Backup) -> None:
        """Make this backup final: :meth:`exchange` no longer replaces it."""
        self._workers[worker].add(sequence, replace(backup))

    def exchange(self, worker: str, sequence: int, old: Backup, weights: Vector) -> bool:
        """Replace the weights of a backup if it is still ``old``, the identical object; return whether it was."""
        if self.get(worker, sequence) is not old:
            return False
        self._workers[worker].add(sequence, replace(old, weights=weights))
        return True

    def forget(self, worker: str) -> None:
        """Free the record of a worker that has left, and refuse its requests from now on."""
        self._gone.add(worker)
        self._workers.pop(worker, None)
        self._waiting.pop(worker, None)

    def records(self) -> RecordTree:
        """Return the applied tasks and each worker's rule state; see :mod:`nfdt.core.sharding.records`.

        The next reply takes a new anchor, as that of a store which starts from these records.
        """
        self._format.renew_anchor()
        rules = {**self._waiting, **{name: record.rule for name, record in self._workers.items()}}
        workers: dict[str, Any] = {name: {"rule": rule} for name, rule in rules.items()}
        return {"tasks": self._applied.to_array(), "workers": workers}

    def restore(self, records: RecordTree) -> None:
        """Keep the rule states for the first pull of each worker, whose sequence numbers start again.

        Raises:
            ShapeMismatch: the records belong to another program or rule.
        """
        initial, workers = self._engine.new_worker(), records.get("workers", {})
        self._waiting = {name: self._engine.restored(own.get("rule", {}), initial) for name, own in workers.items()}
        self._applied = TaskNumbers(records.get("tasks", ()))

    def resync(self) -> None:
        """Send all weights with the next reply to each worker: deltas to distant weights would be coarse."""
        for record in self._workers.values():
            record.resync = True
        self._format.renew_anchor()

    def anchor(self, snapshot: Callable[[], Vector]) -> Vector | None:
        """Return the anchor of the next reply, or None; ``snapshot`` returns the current weights."""
        return self._format.anchor(snapshot, len(self._workers))
