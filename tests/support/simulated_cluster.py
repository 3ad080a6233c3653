"""Workers, shards and a client in one thread, which execute the coordinator's instructions in any order."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np

from nfdt.consistency import make_policy
from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.work.instructions import (
    BeginEpoch,
    CollectState,
    Emit,
    EpochDone,
    EpochState,
    Evaluate,
    Evaluated,
    Failed,
    FlushShards,
    ForgetWorker,
    Leave,
    MoveShards,
    Report,
    Summarise,
    Summary,
    TaskTime,
    TrainingDone,
    Wait,
    Work,
)
from nfdt.model.training.merge import encode_arrays
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.driver import LoopDriver, Step
from nfdt.worker.loop import WorkerLoop
from tests.support.clocks import ManualClock

RULES = [{"rule": "mean", "decay": None}]


def job(
    preset="asgd", *, workers=2, samples=20, validation=None, stream=False, interactive=True, overrides=None, **fit
):
    """Return a job's specification with small numbers."""
    return JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm(preset, **(overrides or {})),
        cluster=ClusterSpec(workers=workers),
        fit=FitSpec(**{"epochs": 1, "batch_size": 4, **fit}),
        train=DataSpec(kind="stream") if stream else DataSpec(kind="arrays", samples=samples),
        validation=DataSpec(kind="arrays", samples=validation) if validation else None,
        attended=interactive,
        step_timeout_s=60,
        start_timeout_s=20,
    )


class LatePush:
    """Push whose answer arrives when it is waited for."""

    arrived = False

    def __init__(self, pushed, clock):
        self._pushed, self._clock, self._sent_at = pushed, clock, clock()

    def result(self):
        return replace(self._pushed, seconds=self._clock() - self._sent_at)


class LateShards:
    """Client of shards of one weight, which answer no push before somebody waits for it.

    ``pushed`` takes the numbers of the tasks of each push; ``clock`` returns the worker's time.
    """

    def __init__(self, pushed, clock):
        self._pushed, self._clock = pushed, clock

    def pull(self, *, exact=True, kept=False):
        return Pulled(np.zeros(1, np.float32), (0,))

    def begin_push(self, gradient, *, tasks, **options):
        self._pushed(tasks)
        weights = np.zeros(1, np.float32) if options["want_weights"] else None
        return LatePush(Pushed(weights, (0,), 0, True), self._clock)


class SimulatedWorker(LoopDriver):
    """Worker whose loop executes one instruction at a time; it can be lost between ``ask`` and ``do``.

    A test calls ``ask`` when the loop wants it.
    """

    def __init__(self, cluster, name, index):
        self.cluster, self.name, self.index = cluster, name, index
        self.instruction = None
        self.epoch, self.samples, self.begun, self._computed = 0, 0, [], {}
        self._now = 0.0  # its own clock, which passes as it computes
        super().__init__(cluster.spec, LateShards(self._pushed, lambda: self._now))
        self._loop = WorkerLoop(self, lambda: self._now)
        self._wants = self._loop.run()
        _, self.report = next(self._wants)

    @property
    def in_flight(self):
        return [task for sent in self.pipeline.in_flight for task, _ in sent]

    def _leased(self):
        """Return the tasks in flight that the worker holds."""
        runs = filter(None, (self.cluster.coordinator.run, self.cluster.coordinator.ahead))
        held = [task for run in runs for task in run.training.book.held(self.name)]
        return [task for task in self.in_flight if task in {each.task for each in held}]

    def ask(self):
        if isinstance(self.instruction, Wait):
            self.do()
        report, self.report = self.report, Report()
        self.instruction = self.cluster.coordinator.next(self.name, report)
        return self.instruction

    def do(self):
        """Execute the instruction; the report is sent with the next call of ``ask``."""
        instruction, self.instruction = self.instruction, None
        ahead = getattr(instruction, "ahead", False)
        assert isinstance(instruction, Work | Wait | MoveShards) or ahead or not self._leased(), (
            "only more work overlaps with pushes, but for those of tasks that others have finished"
        )
        if isinstance(instruction, Leave):
            return
        if isinstance(instruction, Work):
            assert instruction.epoch in (self.epoch, self.epoch + self._local)
            instruction = replace(instruction, look_ahead=False)
        wanted, *arguments = self._wants.send(instruction)
        while wanted != self.ask:
            wanted, *arguments = self._wants.send(wanted(*arguments))
        (self.report,) = arguments

    @property
    def _local(self):
        return self.spec.algorithm.exchange_facts.local

    def compute(self, task, held):
        self._computed.setdefault(task.task, []).append(task)
        samples = task.stop - task.start or task.samples
        self.samples += samples
        time = self.cluster.time_of(self, task)
        self._now += time.compute_s + time.exchange_s
        gradient = None if self._local else np.zeros(1, np.float32)
        return Step(gradient, samples, {"loss": np.float64(self.index)}, time.compute_s)

    def difference(self, held):
        return np.zeros(1, np.float32)

    def forget(self):
        self._computed.clear()

    def _pushed(self, tasks):
        for parts in (self._computed.pop(task) for task in tasks if task in self._computed):
            whole = replace(parts[0], stop=parts[-1].stop, samples=parts[-1].samples)
            self.cluster.trained[self.epoch].update(self.cluster.rows(whole))
            self.cluster.pushes.append((self.name, whole))

    def metrics(self):
        return dump_arrays({"sum/0": np.array(float(self.samples))})

    def begin_apart(self):
        self.others, self.samples = self.samples, 0

    def end_apart(self):
        counted, self.samples = self.metrics(), self.others
        return counted

    def execute(self, instruction):
        match instruction:
            case BeginEpoch(epoch, untrained):
                self.epoch, self.samples = epoch, 0
                self.begun.append((epoch, untrained))
            case CollectState(epoch):
                state = encode_arrays([np.array([float(self.index)])])
                metrics = self.metrics()
                return Report(epoch_state=EpochState(epoch, state, metrics, self._loop.epoch_steps))
            case Evaluate(epoch, tasks):
                metrics = dump_arrays({"sum/0": np.array(float(sum(t.stop - t.start for t in tasks)))})
                return Report(evaluated=Evaluated(epoch, tuple(t.task for t in tasks), metrics))
            case Summarise(_, metrics, validation, logs):
                return Report(summary=self._summary(metrics, validation, logs))
        return Report()

    def _summary(self, metrics, validation, logs):
        seen = float(load_arrays(metrics)["sum/0"]) if metrics else -1.0
        rows = float(load_arrays(validation)["sum/0"]) if validation else None
        return Summary({"seen": seen, **logs}, None if rows is None else {"rows": rows})


class SimulatedCluster:
    """Coordinator and its environment; every step is triggered by a test."""

    worker_type = SimulatedWorker
    restorable = False

    def __init__(self, spec, batches=None):
        self.spec = spec
        self.clock = ManualClock()
        self.merger = StateMerger(RULES, [np.zeros(1)])
        policy = make_policy(spec.algorithm)
        self.coordinator = Coordinator(spec, policy, self.clock, self.merger, restorable=self.restorable)
        self.workers = {}
        self.trained = defaultdict(Counter)
        self.pushes = []
        self.events = []
        self.effects = []
        self.batches = batches or []
        self.unflushed = []
        self.proceeds = []
        self._fed = Counter()
        self._ended = set()
        self._joined = 0
        self.settle()

    def time_of(self, worker, task):
        """Return the task time that a worker reports: every other worker is slower."""
        return TaskTime(task.samples * 0.001 * (1 + 3 * (worker.index % 2)))

    def rows(self, task):
        if task.data:
            return [task.data]
        return [(task.pass_index, row) for row in range(task.start, task.stop)]

    def join(self, count=1):
        for _ in range(count):
            name = f"worker-{self._joined}"
            self.workers[name] = self.worker_type(self, name, self._joined)
            self.coordinator.joined(name, self._joined)
            self._joined += 1
        self.settle()

    def kill(self, name, reason="killed"):
        self.workers.pop(name, None)
        self.coordinator.left(name, reason)
        self.settle()

    def turn(self, name):
        """Let one worker execute its instruction, or ask for one."""
        worker = self.workers[name]
        if worker.instruction is None or isinstance(worker.instruction, Wait):
            worker.ask()
        else:
            worker.do()
        self.settle()

    def settle(self):
        """Record effects; of the answers of shards and client, only those about lost workers come by themselves."""
        while effects := self.coordinator.drain():
            for effect in effects:
                self.effects.append(effect)
                self._carry_out(effect)

    def _carry_out(self, effect):
        match effect:
            case Emit(kind, data):
                self.events.append((kind, data))
            case FlushShards(epoch):
                self.unflushed.append(epoch)
            case EpochDone(epoch):
                self.proceeds.append(epoch + 1)
            case ForgetWorker(worker, tasks):
                self.forget(worker, tasks)

    def forget(self, worker, tasks):
        """Answer with those of the tasks that the worker has pushed."""
        pushed = {task.task for name, task in self.pushes if name == worker}
        self.coordinator.forgotten(worker, [pushed & set(tasks)])

    def flush(self):
        if self.unflushed:
            self.coordinator.flushed(self.unflushed.pop())
            self.settle()

    def proceed(self):
        if self.proceeds:
            self.coordinator.proceed(self.proceeds.pop())
            self.settle()

    def feed(self):
        """Send one batch, or the end, if there is credit."""
        credit = self.coordinator.feed_credit
        epoch = credit.epoch
        if epoch in self._ended or not credit.free:
            return
        if self._fed[epoch] < len(self.batches):
            self.coordinator.fed(epoch, self.batches[self._fed[epoch]], 4)
            self._fed[epoch] += 1
        else:
            self._ended.add(epoch)
            self.coordinator.feed_ended(epoch)
        self.settle()

    def run(self, most=20_000):
        """Let workers, shards and client act in turn until the job has ended."""
        for _ in range(most):
            if self.over:
                return
            for name in list(self.workers):
                self.turn(name)
            self.flush()
            self.proceed()
            if self.spec.train.kind == "stream":
                self.feed()
            self.clock.advance(0.01)
        raise AssertionError(f"The job hangs in {self.coordinator.phase}, for {self.coordinator.waiting_for()}.")

    @property
    def over(self):
        return any(isinstance(e, TrainingDone | Failed) for e in self.effects)

    def of(self, kind):
        """Return the data of all events of a kind."""
        return [data for k, data in self.events if k == kind]

    def all_left(self):
        return all(isinstance(w.ask(), Leave) for w in self.workers.values())


def started(spec, batches=None):
    """Return a cluster whose workers have joined and whose first epoch may begin."""
    cluster = SimulatedCluster(spec, batches)
    cluster.join(spec.cluster.workers)
    cluster.coordinator.proceed(spec.fit.initial_epoch)
    cluster.settle()
    return cluster
