"""Staleness bound of ``ssp`` for the weights that a gradient is computed on, in any order of events."""

import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.consistency import make_policy
from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.work.instructions import Report
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.driver import LoopDriver, Step
from nfdt.worker.loop import WorkerLoop
from tests.support.clocks import ManualClock
from tests.support.simulated_cluster import job


@dataclass
class Push:
    """Gradient with updates by worker in the weights it was computed on, and in those it was applied to."""

    worker: str
    seen: Counter
    met: Counter

    @property
    def own(self):
        """Number of updates of its own worker that it missed."""
        return self.met[self.worker] - self.seen[self.worker]

    @property
    def others(self):
        """Numbers of updates that it missed, one for each other worker."""
        return [count for name, count in (self.met - self.seen).items() if name != self.worker]


class Shard:
    """Shard that applies pushes and counts those of each worker in its weights."""

    def __init__(self):
        self.applied = Counter()
        self.pushes = []

    def push(self, worker, seen):
        self.pushes.append(Push(worker, seen, self.applied.copy()))
        self.applied[worker] += 1
        return self.applied.copy()


class InFlight:
    """Push that reaches the shard when the test lets it."""

    def __init__(self, computed_on, wanted):
        self.computed_on, self.wanted = computed_on, wanted
        self.pushed = None

    @property
    def arrived(self):
        return self.pushed is not None

    def result(self):
        return self.pushed


class Client:
    """Client whose weights and gradients are counts of updates."""

    def __init__(self, shard):
        self.shard = shard
        self.sent = deque()  # pushes that the shard has not applied

    def pull(self, *, exact, kept=False):
        assert not self.sent, "a pull while pushes are unanswered"
        return Pulled(self.shard.applied.copy(), (0,))

    def begin_push(self, gradient, *, want_weights, **options):
        self.sent.append(InFlight(gradient, want_weights))
        return self.sent[-1]


class Worker(LoopDriver):
    """A worker's loop in single small steps."""

    def __init__(self, spec, coordinator, shard, name):
        self.coordinator, self.name = coordinator, name
        self.shard, self.client = shard, Client(shard)
        super().__init__(spec, self.client)
        self.loop = WorkerLoop(self, lambda: 0.0).run()
        self.steps = self.life()

    def apply(self):
        """Let the oldest push in flight reach the shard."""
        if self.client.sent:
            push = self.client.sent.popleft()
            answer = self.shard.push(self.name, push.computed_on)
            push.pushed = Pushed(answer if push.wanted else None, (0,), 0, True)

    def life(self):
        answer = None
        while True:
            wanted, *arguments = self.loop.send(answer)
            while wanted == self.await_replies and len(self.client.sent) > arguments[0]:
                yield
            answer = wanted(*arguments)
            yield

    def ask(self, report):
        return self.coordinator.next(self.name, report)

    def compute(self, task, held):
        return Step(held.weights, task.samples, {}, 0.01 * (1 + 9 * (self.name == "worker-0")))

    def execute(self, instruction):
        return Report()


def play(seed, workers, bound, overlap, *, kills=0, **overrides):
    """Let workers of different speeds move in a random order; return every push."""
    rng = random.Random(seed)
    overrides = {"staleness_bound": bound, "overlap": overlap, **overrides}
    spec = job("ssp", workers=workers, samples=300, overrides=overrides)
    coordinator, shard = Coordinator(spec, make_policy(spec.algorithm), ManualClock()), Shard()
    running, speeds = {}, {}

    def join():
        name = f"worker-{len(speeds)}"
        coordinator.joined(name, len(speeds))
        running[name], speeds[name] = Worker(spec, coordinator, shard, name), rng.random() ** 4 + 0.005

    for _ in range(workers):
        join()
    coordinator.proceed(0)
    for worker in running.values():
        next(worker.steps)
    dying = {rng.randrange(1000) for _ in range(kills)}
    for move in range(2000):
        (name,) = rng.choices(list(running), [speeds[name] for name in running])
        if move in dying:
            coordinator.left(name, "killed")
            del running[name]
            join()
        elif rng.random() < 0.3:
            running[name].apply()
        else:
            next(running[name].steps)
        if rng.random() < 0.02:
            speeds[name] = rng.random() ** 4 + 0.005
    return shard.pushes


RUNS = {
    "seed": st.integers(0, 2**32),
    "workers": st.integers(1, 4),
    "bound": st.integers(0, 3),
    "overlap": st.integers(0, 2),
}


@given(**RUNS)
def test_step_c_is_computed_on_weights_that_hold_the_steps_before_c_minus_s(seed, workers, bound, overlap):
    for push in play(seed, workers, bound, overlap):
        step = push.met[push.worker]
        assert all(push.seen[f"worker-{other}"] >= step - bound for other in range(workers))


@given(**RUNS)
def test_a_gradient_is_at_most_2s_and_1_updates_behind_each_other_worker(seed, workers, bound, overlap):
    for push in play(seed, workers, bound, overlap):
        assert push.own <= min(overlap, bound)
        assert all(missed <= 2 * bound + 1 for missed in push.others)


@given(**RUNS, tasks=st.sampled_from(["dynamic", "static", "finish-together"]))
def test_the_bound_holds_while_workers_come_and_go_and_rest(seed, workers, bound, overlap, tasks):
    for push in play(seed, workers, bound, overlap, kills=5, tasks=tasks):
        assert push.own <= min(overlap, bound)
        assert all(missed <= 2 * bound + 1 for missed in push.others)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_the_bound_can_be_reached(bound):
    assert max(max(push.others, default=0) for seed in range(20) for push in play(seed, 3, bound, 0)) == 2 * bound + 1
