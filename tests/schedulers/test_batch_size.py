"""Dynamic batch sizes: a constant total, and sizes that follow speeds."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.batch_policies import BatchSizes, Bounds
from nfdt.schedulers.throughput import Speeds, StepTime

REFERENCE = 32


class Workers:
    """Workers of given step times that execute their steps in turn."""

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


def test_overhead_is_evened_out_in_multiples_too():
    workers = Workers({"a": StepTime(0.5, 0.01), "b": StepTime(0.0, 0.03)}, Bounds(8, None, 8))
    workers.rounds(80)
    assert max(workers.seconds()) - min(workers.seconds()) <= 8 * (0.01 + 0.03)


def test_the_slowest_takes_one_sample_at_least():
    assert Workers(proportional(1, 1000)).rounds(12) == [63, 1]


def test_equal_speeds_keep_equal_batches_after_one_probe():
    workers = Workers(proportional(1, 1, 1))
    assert workers.rounds(100) == [32, 32, 32]
    assert workers.changes == 3  # tilted, tilted back, level
    assert workers.speeds.of("w0").identified
    assert workers.speeds.of("w1").identified


def test_the_probe_is_left_out_where_the_bounds_leave_no_room():
    workers = Workers(proportional(1, 1), Bounds(32, 32))
    workers.rounds(60)
    assert workers.changes == 0


def test_a_probe_is_over_before_the_next_look_would_be_due():
    workers = Workers(proportional(1, 1))
    changed = []
    for step in range(60):
        before = workers.changes
        workers.rounds(1)
        changed += [step] * (workers.changes - before)
    assert len(changed) == 3
    assert changed[2] - changed[0] < 20


def test_speeds_known_at_two_sizes_need_no_probe():
    workers = Workers(proportional(1, 1))
    for _ in range(8):
        for name in workers.times:
            for samples in (24, 40):
                workers.speeds.measured(name, samples, workers.times[name].seconds(samples))
    workers.rounds(60)
    assert workers.speeds.of("w0").identified
    assert workers.changes == 0


def probing(workers):
    """Return the workers at the moment of their first change."""
    while workers.changes < 1:
        workers.rounds(1)
    return workers


@pytest.mark.parametrize(("least", "most", "changes"), [(29, 35, 3), (30, 35, 0), (29, 34, 0)])
def test_a_probe_stays_within_the_bounds(least, most, changes):
    workers = Workers(proportional(1, 1), Bounds(least, most))
    workers.rounds(60)
    assert workers.changes == changes


@pytest.mark.parametrize(("bounds", "sizes"), [(Bounds(), [35, 29]), (Bounds(8, 80, 8), [40, 24])])
def test_a_probe_moves_a_tenth_or_the_smallest_step_there_is(bounds, sizes):
    assert list(probing(Workers(proportional(1, 1), bounds)).sizes.sizes.values()) == sizes


def test_every_pair_is_probed_at_once():
    workers = probing(Workers(proportional(1, 1, 1, 1, 1)))
    assert list(workers.sizes.sizes.values()) == [35, 29, 35, 29, 32]


def test_a_worker_that_joins_ends_a_probe_and_begins_none():
    workers = probing(Workers(proportional(1, 1)))
    workers.times["late"] = StepTime(0.0, 1.0)
    workers.sizes.joined("late")
    workers.rounds(80)
    assert workers.changes == 2  # tilted, level


def test_a_probe_ends_when_one_of_its_workers_leaves():
    workers = probing(Workers(proportional(1, 1, 1)))
    del workers.times["w1"]
    workers.sizes.left("w1")
    for _ in range(60):
        workers.rounds(1)
        assert set(workers.sizes.sizes) == {"w0", "w2"}
    assert workers.changes == 1  # and no change follows


def test_a_worker_that_comes_back_takes_b0_until_it_is_measured_again():
    workers = Workers(proportional(1, 1, 4, 4))
    workers.rounds(30)
    workers.sizes.left("w3")
    workers.speeds.remove("w3")
    assert set(workers.sizes.sizes) == {"w0", "w1", "w2"}
    assert sum(workers.sizes.sizes.values()) == 3 * REFERENCE
    workers.sizes.joined("w3")
    assert workers.rounds(5)[3] == REFERENCE
    assert workers.rounds(1)[3] < REFERENCE


def test_an_absent_worker_takes_b0_and_changes_nothing():
    workers = Workers(proportional(1, 4))
    workers.rounds(12)
    before = workers.sizes.sizes
    assert workers.sizes.of("unknown") == REFERENCE
    workers.sizes.left("unknown")
    assert not workers.sizes.stepped("unknown", workers.speeds)
    assert workers.sizes.sizes == before


@pytest.mark.parametrize("factor", [0.25, 2.0, 4.0])
def test_a_step_change_is_followed_within_twenty_steps(factor):
    workers = Workers(proportional(1, 1, 4, 4))
    workers.rounds(100)
    workers.times["w0"] = StepTime(0.0, factor)
    workers.rounds(20 + 5)
    times = workers.seconds()
    assert max(times) <= 1.15 * min(times)


def test_a_change_of_speed_is_looked_at_as_soon_as_it_is_noticed():
    workers = Workers(proportional(1, 1, 4, 4))
    before = workers.rounds(100)
    workers.times["w0"] = StepTime(0.0, 4.0)
    assert workers.rounds(4) == before  # these may be outliers
    assert workers.rounds(2) != before


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
def test_the_total_is_b0_per_worker_when_workers_join_or_leave(events):
    workers = Workers({}, Bounds(1, 100))
    for kind, number in events:
        name = f"w{number}"
        if kind == "join" and name not in workers.times:
            workers.times[name] = StepTime(0.001 * number, 0.001 * (number + 1))
            workers.sizes.joined(name)
        elif kind == "leave" and name in workers.times:
            del workers.times[name]
            workers.sizes.left(name)
            workers.speeds.remove(name)
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


def test_samples_that_no_worker_may_take_are_left_in_further_parts():
    workers = Workers(proportional(1, 1), Bounds(1, 40))
    assert workers.sizes.split(64) == [("w0", 32), ("w1", 32)]
    assert workers.sizes.split(128) == [("w0", 40), ("w1", 40), ("", 40), ("", 8)]
    assert workers.sizes.split(1) == [("w0", 1)]


class FixedSpeeds:
    """Speeds that are given, not measured."""

    def __init__(self, **seconds):
        self.seconds, self.count = seconds, 0

    def of(self, worker):
        line = StepTime(0.0, self.seconds[worker])
        return SimpleNamespace(step_time=line, steps=self.count, changes=0, identified=True)


def test_sizes_are_looked_at_whenever_a_worker_has_done_twenty_steps_more():
    sizes, speeds = BatchSizes(100), FixedSpeeds(a=1.0, b=1.0)
    for worker in ("a", "b"):
        sizes.joined(worker)
    sizes.stepped("a", speeds)
    speeds.seconds["b"] = 3.0
    changed = []
    for speeds.count in range(1, 41):
        if sizes.stepped("a", speeds):
            changed.append(speeds.count)
    assert changed == [20]
    assert sizes.sizes == {"a": 150, "b": 50}


def test_a_worker_that_leaves_gives_its_samples_to_the_others_in_proportion():
    sizes, speeds = BatchSizes(60), FixedSpeeds(a=1.0, b=2.0, c=2.0)
    for worker in ("a", "b", "c"):
        sizes.joined(worker)
    sizes.stepped("a", speeds)
    assert sizes.sizes == {"a": 90, "b": 45, "c": 45}
    sizes.left("c")
    assert sizes.sizes == {"a": 80, "b": 40}
