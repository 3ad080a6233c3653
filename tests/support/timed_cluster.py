"""Simulated cluster whose workers' steps have durations, on a virtual clock that jumps from report to report."""

from collections import defaultdict

from nfdt.core.work.instructions import TaskTime, Wait, Work
from tests.support.simulated_cluster import SimulatedCluster


class TimedCluster(SimulatedCluster):
    """Cluster whose workers all train until the job has ended.

    ``step_s(worker index, samples, now)`` returns the seconds of a gradient; ``exchange_s`` is those of its push and
    reply, which are hidden as far as the step's overlap allows: 1 + overlap steps are in flight at any time.
    ``ends[epoch][worker]`` is the time of a worker's last step of the epoch.
    ``steps`` lists (worker, began_at, samples, seconds).
    """

    def __init__(self, spec, step_s, exchange_s=0.0):
        super().__init__(spec)
        self.step_s, self.exchange_s = step_s, exchange_s
        self.busy = {}
        self.ends = defaultdict(dict)
        self.steps = []
        self.times = {}
        self.join(spec.cluster.workers)
        self.coordinator.proceed(spec.fit.initial_epoch)

    def run(self, most=100_000):
        for _ in range(most):
            while self._all_ask():
                pass
            if self.over:
                return self
            assert self.busy, f"The job hangs in {self.coordinator.phase}, for {self.coordinator.waiting_for()}."
            name = min(self.busy, key=lambda name: self.busy[name][0])
            self.clock.advance(max(0.0, self.busy[name][0] - self.clock.now()))
            self._report(name)
        raise AssertionError("The job does not end.")

    def _all_ask(self):
        """Let every idle worker ask; return whether any got a new instruction."""
        news = False
        for name, worker in self.workers.items():
            if name in self.busy:
                continue
            news = news or bool(worker.report.finished)  # which may change what those get who have asked before
            instruction = worker.ask()
            self.settle()
            if isinstance(instruction, Work):
                self.busy[name] = self._work(worker, instruction)
                news = True
            elif isinstance(instruction, Wait):
                news = news or bool(worker.in_flight)  # it asks again with what was in flight
            elif not self.over:
                worker.do()
                news = True
        news = news or bool(self.unflushed or self.proceeds)
        self.flush()
        self.proceed()
        return news and not self.over

    def _work(self, worker, work):
        """Return the time at which the worker will be done, the epoch and the tasks done by then."""
        began = at = self.clock.now()
        done = []
        for task in work.tasks:
            if done and at - began >= work.budget_s:
                break
            seconds = self.step_s(worker.index, task.samples, at)
            waits = max(0.0, (seconds + self.exchange_s) / (1 + work.overlap) - seconds)
            self.steps.append((worker.name, at, task.samples, seconds + waits))
            self.times[task.task] = TaskTime(seconds, waits)
            done.append(task)
            at += seconds + waits
        return at, work.epoch, done

    def _report(self, name):
        at, epoch, done = self.busy.pop(name)
        worker = self.workers[name]
        worker.instruction = Work(epoch, tuple(done), overlap=worker.instruction.overlap)
        worker.do()
        self.ends[epoch][name] = at

    def time_of(self, worker, task):
        return self.times[task.task]
