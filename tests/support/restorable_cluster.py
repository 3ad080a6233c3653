"""Simulated cluster whose shards take snapshots, are lost, and go back to the newest one."""

from collections import Counter
from dataclasses import dataclass, field

from nfdt.coordinator.failover import Reach, Seek, Start
from nfdt.coordinator.recovery import MOST_LOSSES
from nfdt.core.work.instructions import Evaluate, MoveShards, Wait, Work
from nfdt.core.work.tasks import Task
from tests.support.simulated_cluster import SimulatedCluster, SimulatedWorker


@dataclass(frozen=True)
class AppliedPush:
    """Push that a shard has applied."""

    epoch: int
    task: Task


@dataclass
class SimulatedShard:
    """A shard: the pushes that its weights contain, in order, and the tasks that it knows to be applied."""

    lineage: list = field(default_factory=list)
    tasks: set = field(default_factory=set)
    parts: dict = field(default_factory=dict)  # of the open round
    closed_round: int = 0

    def push(self, push):
        """Apply a push; duplicates have no effect."""
        task = push.task
        if not task.round:
            if task.task not in self.tasks:
                self.tasks.add(task.task)
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
        return SimulatedShard(list(self.lineage), set(self.tasks), {}, self.closed_round)


class RestorableWorker(SimulatedWorker):
    """Worker that pushes to two shards; after a restoration it drops its work and its report."""

    def __init__(self, cluster, name, index):
        self.incarnation = cluster.incarnation
        super().__init__(cluster, name, index)

    def moved(self):
        return self.incarnation != self.cluster.incarnation

    def ask(self):
        if self.moved():
            self.instruction = MoveShards("job", self.cluster.incarnation, (), "token")
            self.do()
        return super().ask()

    def do(self):
        here = not self.moved() and not self.cluster.lost
        if here or not isinstance(self.instruction, Work | Evaluate):
            super().do()
        else:
            self.instruction = Wait()  # it cannot be executed without the shards

    def move(self):
        self.incarnation = self.cluster.incarnation

    def compute(self, task, held):
        for shard in self.cluster.shards:
            shard.push(AppliedPush(self.epoch, task))
        return super().compute(task, held)

    def push_half(self):
        """Push the first task of the work that it has been given to one shard of two."""
        if not self.moved() and not self.cluster.lost and isinstance(self.instruction, Work):
            self.cluster.shards[0].push(AppliedPush(self.instruction.epoch, self.instruction.tasks[0]))


class RestorableCluster(SimulatedCluster):
    """Coordinator and its environment, with snapshots and losses of the shards."""

    worker_type = RestorableWorker
    restorable = True
    keeps = True  # the weights of each epoch's end, so that the next one begins ahead

    def __init__(self, spec, batches=None):
        begun = spec.fit.begun.round if spec.fit.begun else 0
        self.shards = [SimulatedShard(closed_round=begun) for _ in range(2)]
        self.newest = [SimulatedShard() for _ in range(2)]
        self.incarnation = 0
        self.lost = False
        self.redone = 0
        self._taking = None  # copies of a snapshot that is not stored yet
        self._taken_of = 0  # incarnation
        self._forgotten = []  # not answered, because the shards are lost
        super().__init__(spec, batches)

    # ---- snapshots

    def snapshot(self, steps=4):
        """Do the next steps of a snapshot: begin, copy both shards, of rounds at the same moment, store."""
        recovery = self.coordinator.recovery
        for _ in range(steps):
            if self._taking is None:
                if recovery.begin_snapshot():
                    self._taking, self._taken_of = [], self.incarnation
            elif len(self._taking) == len(self.shards):
                self._end_snapshot(recorded=self._store(self._taking))
            elif self.lost or self._taken_of != self.incarnation:
                self._end_snapshot(recorded=False)  # the shards do not answer
            elif not self._taking and (step := recovery.snapshot_step()) != "copy":
                if step == "drop":
                    self._end_snapshot(recorded=False)
            else:
                rounds = self.spec.algorithm.consistency == "bsp"
                self._taking += [shard.copy() for shard in self.shards[len(self._taking) :][: 2 if rounds else 1]]
                if len(self._taking) == len(self.shards):
                    recovery.go_on()
            self.settle()

    def _store(self, snapshot, exact=False):
        adopted = self.coordinator.recovery.adopt([shard.tasks for shard in snapshot], exact=exact)
        assert adopted == (not self.lost and self._taken_of == self.incarnation)
        if adopted:
            self.newest = snapshot
        return adopted

    def _end_snapshot(self, *, recorded):
        self._taking = None
        self.coordinator.recovery.end_snapshot(recorded=recorded)

    def flush(self):
        if self.unflushed and not self.lost:
            epoch = self.unflushed.pop(0)
            if self._taking is not None:
                self._end_snapshot(recorded=False)
            assert self.coordinator.recovery.begin_snapshot()
            self._taken_of = self.incarnation
            if self.coordinator.recovery.snapshot_step() == "copy":
                self._store([shard.copy() for shard in self.shards], exact=True)
            self._end_snapshot(recorded=True)
            self.coordinator.flushed(epoch, kept=self.keeps)
            self.settle()

    # ---- losses

    def lose_shards(self):
        """Lose the shards, unless once more would end the job."""
        if not self.lost and self.coordinator.recovery._losses < MOST_LOSSES - 1:
            self.lost = True
            assert self.coordinator.recovery.lost("shard-0", "it was killed") == Seek()
            self.settle()

    def roll_back(self):
        """Go back to the end of the last epoch, if workers have begun another one ahead."""
        if not self.lost and self.coordinator.recovery.roll_back():
            self.lost = True
            self.settle()

    def restore(self):
        if not self.lost:
            return
        self.lost = False
        self.incarnation += 1
        self.shards = [shard.copy() for shard in self.newest]
        recovery = self.coordinator.recovery
        assert recovery.checked(()) == Start(self.incarnation)
        assert recovery.checked(()) == Reach(self.incarnation)
        self.redone += recovery.called(self.incarnation, answered=True).redone_samples
        waiting, self._forgotten = self._forgotten, []
        for worker, tasks in waiting:
            self.forget(worker, tasks)
        self.settle()

    # ---- environment

    def forget(self, worker, tasks):
        if self.lost:
            self._forgotten.append((worker, tasks))
        else:
            self.coordinator.forgotten(worker, [shard.tasks & set(tasks) for shard in self.shards])

    def run(self, most=20_000):
        self.restore()
        if self._taking is not None:
            self._end_snapshot(recorded=False)
        super().run(most)

    def rows_applied(self):
        """Return how often the final weights contain each row, by epoch; it is the same on all shards."""
        counts = {}
        assert Counter(self.shards[0].lineage) == Counter(self.shards[1].lineage)
        for push in self.shards[0].lineage:
            counts.setdefault(push.epoch, Counter()).update(self.rows(push.task))
        return counts
