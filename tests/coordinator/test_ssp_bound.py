"""Staleness bound of ``ssp`` for the weights that a gradient is computed on, in any order of events."""

import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.consistency import make_policy
from nfdt.coordinator import BeginEpoch, Coordinator, Report, TaskTime, Work
from nfdt.core.clock import ManualClock
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


class Worker:
    """Worker that does what :mod:`nfdt.worker.worker` does with its pipeline, in single small steps."""

    def __init__(self, coordinator, shard, name, overlap):
        self.coordinator, self.shard, self.name, self.overlap = coordinator, shard, name, overlap
        self.sent = deque()  # (task, weights it was computed on, whether the answer holds weights), not applied
        self.answers = deque()  # (task, weights or None), not taken
        self.held = None
        self.steps = self.life()

    def apply(self):
        """Let the oldest push in flight reach the shard."""
        if self.sent:
            task, computed_on, wanted = self.sent.popleft()
            answer = self.shard.push(self.name, computed_on)
            self.answers.append((task, answer if wanted else None))

    def taken(self, unanswered):
        """Take answers until at most ``unanswered`` pushes are unanswered; yields while they are in flight."""
        finished = []
        while len(self.sent) + len(self.answers) > unanswered:
            if self.answers:
                task, self.held = self.answers.popleft()
                finished.append(task)
            yield
        return finished

    def life(self):
        finished, epoch = [], 0
        while True:
            in_flight = frozenset(sent[0] for sent in (*self.answers, *self.sent))
            times = dict.fromkeys(finished, TaskTime(0.01 * (1 + 9 * (self.name == "worker-0"))))
            instruction = self.coordinator.next(
                self.name, Report(tuple(finished), epoch, in_flight=in_flight, times=times)
            )
            yield
            finished = []
            if not isinstance(instruction, Work):
                finished = yield from self.taken(0)
                if isinstance(instruction, BeginEpoch):
                    epoch, self.held = instruction.epoch, None
                continue
            if instruction.pull:
                finished = yield from self.taken(0)
                self.held = None
            for task in instruction.tasks:
                if self.held is None:
                    assert not self.sent, "a pull while pushes are unanswered"
                    self.held = self.shard.applied.copy()
                    yield
                self.sent.append((task.task, self.held, not instruction.no_weights))
                yield
                finished += yield from self.taken(instruction.overlap)


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
        running[name], speeds[name] = Worker(coordinator, shard, name, overlap), rng.random() ** 4 + 0.005

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
