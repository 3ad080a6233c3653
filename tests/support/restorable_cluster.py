"""Simulated cluster whose shards take snapshots, are lost, and go back to the newest one."""

from collections import Counter
from dataclasses import dataclass, field, replace

from nfdt.coordinator import Evaluate, ForgetWorker, Report, Wait, Work
from nfdt.core.work.tasks import Task
from tests.support.simulated_cluster import SimulatedCluster, SimulatedWorker


@dataclass(frozen=True)
class AppliedPush:
    """Push that the shards have applied."""

    epoch: int
    worker: str
    incarnation: int
    sequence: int
    task: Task

    @property
    def key(self):
        return self.incarnation, self.worker, self.sequence


@dataclass
class SimulatedShards:
    """All shards as one: the pushes that their weights contain, in order, and the last sequence of each worker."""

    lineage: list = field(default_factory=list)
    contained: dict = field(default_factory=dict)
    parts: dict = field(default_factory=dict)  # of the open round
    closed_round: int = 0

    def push(self, push):
        """Apply a push; duplicates have no effect."""
        self.contained[push.worker] = push.sequence
        task = push.task
        if not task.round:
            self.lineage.append(push)
        elif task.round > self.closed_round:
            assert task.round == self.closed_round + 1
            assert {part.task.round for part in self.parts.values()} <= {task.round}, "parts of two rounds"
            self.parts.setdefault(task.part, push)
            if len(self.parts) == task.parts:
                self.lineage += [self.parts[part] for part in sorted(self.parts)]
                self.parts, self.closed_round = {}, task.round

    def copy(self):
        assert not self.parts, "a snapshot of an open round"
        return SimulatedShards(list(self.lineage), dict(self.contained), {}, self.closed_round)

    def restored(self):
        """Return shards that continue from this snapshot, for pushes that are numbered from 1 again."""
        return replace(self.copy(), contained=dict.fromkeys(self.contained, 0))


class RestorableWorker(SimulatedWorker):
    """Worker that numbers its pushes; after a restoration it drops its work and its report."""

    sequence = 0

    def __init__(self, cluster, name, index):
        super().__init__(cluster, name, index)
        self.incarnation = cluster.incarnation
        self.sequences = {}

    def ask(self):
        if self.incarnation != self.cluster.incarnation:
            self._move()
        if isinstance(self.instruction, Wait):
            self._drain()
        sequences = {number: self.sequences.pop(number) for number in self.report.finished}
        self.report = replace(self.report, sequences=sequences)
        self.cluster.reported |= {(self.incarnation, self.name, sequence) for sequence in sequences.values()}
        return super().ask()

    def do(self):
        here = self.incarnation == self.cluster.incarnation and not self.cluster.lost
        if here or not isinstance(self.instruction, Work | Evaluate):
            super().do()
        else:
            self.instruction = Wait()  # it cannot be executed without the shards

    def _move(self):
        """Connect to the restored shards."""
        self.incarnation = self.cluster.incarnation
        self.instruction, self.report, self.in_flight = None, Report(), []
        self.sequences.clear()
        self.sequence = 0

    def _train(self, epoch, tasks, overlap):
        for task in tasks:
            self.sequence += 1
            self.sequences[task.task] = self.sequence
            self.cluster.shards.push(AppliedPush(epoch, self.name, self.incarnation, self.sequence, task))
        super()._train(epoch, tasks, overlap)


class RestorableCluster(SimulatedCluster):
    """Coordinator and its environment, with snapshots and losses of the shards."""

    worker_type = RestorableWorker
    restorable = True

    def __init__(self, spec, batches=None):
        self.shards = SimulatedShards(closed_round=spec.fit.begun.round if spec.fit.begun else 0)
        self.newest = SimulatedShards()
        self.incarnation = 0
        self.lost = False
        self.reported = set()
        self.excused = Counter()  # pushes that may be trained again though the final weights contain them
        self.redone = 0
        self._taking = None  # snapshot that is not stored yet
        super().__init__(spec, batches)

    # ---- snapshots

    def snapshot(self, steps=3):
        """Do the next steps of a snapshot: begin, copy, store."""
        for _ in range(steps):
            if self.lost:
                return
            if self._taking is None:
                self.coordinator.recovery.quiesce()
                self._taking = "begun"
            elif self._taking == "begun":
                if self.coordinator.recovery.is_quiet:
                    self._taking = self.shards.copy()
                    self.coordinator.recovery.go_on()
            else:
                self._store(self._taking)
                self._taking = None
            self.settle()

    def _store(self, snapshot, **exact):
        self.newest = snapshot
        self.coordinator.recovery.settle(snapshot.contained, **exact)

    def flush(self):
        if self.unflushed and not self.lost:
            epoch = self.unflushed.pop(0)
            self._taking = None
            self.coordinator.recovery.go_on()
            self.coordinator.recovery.quiesce()
            if self.coordinator.recovery.is_quiet:
                self._store(self.shards.copy())
            self.coordinator.recovery.go_on()
            self.coordinator.flushed(epoch)
            self.settle()

    # ---- losses

    def lose_shards(self):
        """Lose the shards; what the snapshot contains and no report covers may be trained twice."""
        self.lost, self._taking = True, None
        self.coordinator.recovery.suspend()
        self.settle()

    def restore(self):
        if not self.lost:
            return
        self.lost = False
        self.incarnation += 1
        self.shards = self.newest.restored()
        self._excuse({push.key for push in self.shards.lineage})
        redone = self.coordinator.recovery.resume()
        assert redone >= 0
        self.redone += redone
        assert self.coordinator.recovery.redone_samples == self.redone
        self.settle()

    # ---- environment

    def kill(self, name, reason="killed"):
        if not self.lost:
            self._excuse({push.key for push in self.shards.lineage if push.worker == name})
        if self._taking == "begun":  # the snapshot will contain its pushes, but not their numbers
            self.reported -= {push.key for push in self.shards.lineage if push.worker == name}
        super().kill(name, reason)

    def settle(self):
        done = len(self.effects)
        super().settle()
        for effect in self.effects[done:]:
            if isinstance(effect, ForgetWorker):
                self.shards.contained.pop(effect.worker, None)

    def run(self, most=20_000):
        self.restore()
        if self._taking == "begun":
            self.coordinator.recovery.go_on()
        self._taking = None
        super().run(most)

    def _excuse(self, pushes):
        """Permit that the tasks of these pushes are trained again, unless they were reported."""
        for push in self.shards.lineage:
            if push.key in pushes - self.reported:
                self.excused[push.task.task] += 1
                self.reported.add(push.key)

    def rows_applied(self):
        """Return how often the final weights contain each row, by epoch."""
        counts = {}
        for push in self.shards.lineage:
            counts.setdefault(push.epoch, Counter()).update(self.rows(push.task))
        return counts
