"""Dynamic batch sizes: the total is constant, sizes follow speeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers import BatchSizes, Bounds, Speeds, StepTime

REFERENCE = 32


class Workers:
    """Workers of given step times that do their steps one after the other."""

    def __init__(self, times, bounds=None):
        self.times = dict(times)
        self.speeds = Speeds()
        self.sizes = BatchSizes(REFERENCE, bounds or Bounds())
        self.changes = 0
        for name in self.times:
            self.sizes.joined(name)

    def step(self, name):
        samples = self.sizes.of(name)
        self.speeds.measured(name, samples, self.times[name].seconds(samples))
        self.changes += self.sizes.stepped(name, self.speeds)
        assert sum(self.sizes.sizes.values()) == REFERENCE * len(self.sizes.sizes)

    def rounds(self, count):
        for _ in range(count):
            for name in list(self.times):
                self.step(name)
        return [self.sizes.of(name) for name in self.times]

    def seconds(self):
        return [time.seconds(self.sizes.of(name)) for name, time in self.times.items()]


def proportional(*betas):
    return {f"w{i}": StepTime(0.0, beta) for i, beta in enumerate(betas)}


def test_four_times_slower_workers_take_a_quarter():
    assert Workers(proportional(1, 1, 4, 4)).rounds(12) == [51, 51, 13, 13]


def test_overhead_per_step_is_learned_and_evened_out():
    workers = Workers({"a": StepTime(0.01, 0.001), "b": StepTime(0.04, 0.001), "c": StepTime(0.0, 0.004)})
    workers.rounds(80)
    times = workers.seconds()
    assert max(times) <= 1.1 * min(times)


def test_equal_speeds_keep_equal_batches_after_one_probe():
    workers = Workers(proportional(1, 1, 1))
    assert workers.rounds(100) == [32, 32, 32]
    assert workers.changes == 3  # tilted, tilted back, level
    assert workers.speeds.identified("w0")
    assert workers.speeds.identified("w1")


def test_the_probe_is_left_out_where_the_bounds_leave_no_room():
    workers = Workers(proportional(1, 1), Bounds(32, 32))
    workers.rounds(60)
    assert workers.changes == 0


@pytest.mark.parametrize("factor", [0.25, 2.0, 4.0])
def test_a_step_change_is_followed_within_twenty_steps(factor):
    workers = Workers(proportional(1, 1, 4, 4))
    workers.rounds(100)
    workers.times["w0"] = StepTime(0.0, factor)
    workers.rounds(20 + 5)
    times = workers.seconds()
    assert max(times) <= 1.15 * min(times)


def test_small_changes_of_speed_change_nothing():
    workers = Workers(proportional(1, 2, 1, 2))
    workers.rounds(100)
    changes = workers.changes
    workers.times["w0"] = StepTime(0.0, 1.06)
    workers.rounds(100)
    assert workers.changes == changes


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=10), st.integers(1, 32), st.integers(32, 200))
def test_bounds_hold_at_any_speeds(betas, least, most):
    workers = Workers(proportional(*betas), Bounds(least, most))
    sizes = workers.rounds(30)
    assert all(least <= size <= most for size in sizes)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=10))
def test_sizes_are_multiples_where_that_is_asked_for(betas):
    workers = Workers(proportional(*betas), Bounds(8, 80, 8))
    sizes = workers.rounds(30)
    assert all(size % 8 == 0 for size in sizes)
    assert all(8 <= size <= 80 for size in sizes)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "step", "step", "step"]), st.integers(0, 5)), max_size=200
)


@given(EVENTS)
def test_the_total_is_b0_per_worker_whoever_joins_or_leaves(events):
    workers = Workers({}, Bounds(1, 100))
    for kind, number in events:
        name = f"w{number}"
        if kind == "join" and name not in workers.times:
            workers.times[name] = StepTime(0.001 * number, 0.001 * (number + 1))
            workers.sizes.joined(name)
        elif kind == "leave" and name in workers.times:
            del workers.times[name]
            workers.sizes.left(name)
            workers.speeds.forget(name)
        elif kind == "step" and name in workers.times:
            workers.step(name)
        assert set(workers.sizes.sizes) == set(workers.times)
        assert sum(workers.sizes.sizes.values()) == REFERENCE * len(workers.times)
        assert all(1 <= size <= 100 for size in workers.sizes.sizes.values())


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=6), st.integers(1, 500))
def test_a_round_is_split_by_the_sizes_of_now(betas, total):
    workers = Workers(proportional(*betas), Bounds(1, 40))
    sizes = workers.rounds(10)
    parts = workers.sizes.split(total)
    assert sum(samples for _, samples in parts) == total
    assert all(1 <= samples <= 40 for _, samples in parts)
    if total == sum(sizes):
        assert parts == list(zip(workers.times, sizes, strict=True))


def test_what_nobody_may_take_is_left_in_further_parts():
    workers = Workers(proportional(1, 1), Bounds(1, 40))
    assert workers.sizes.split(64) == [("w0", 32), ("w1", 32)]
    assert workers.sizes.split(128) == [("w0", 40), ("w1", 40), ("", 40), ("", 8)]
    assert workers.sizes.split(1) == [("w0", 1)]
