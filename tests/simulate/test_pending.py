"""Gradients that wait to be computed together: which of them share a call, and what happens where a call fails."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nfdt.core.work.tasks import Task
from nfdt.model.backends.lanes import LaneBatch, LaneResult
from nfdt.model.training.data import ArraySource
from nfdt.simulate.pending import PendingGradients
from nfdt.transport.base import Pulled

ROWS = np.arange(100, dtype="float32")


class Step:
    """Step whose gradient is weights plus the sum of the rows; it counts the rows and adds them to the state."""

    def __init__(self, *, holds=True, stacks=True, error=None):
        self.calls, self.error = [], error
        self._holds, self._stacks = holds, stacks

    def hold(self, pytree):
        (self.held,) = pytree
        return self._holds

    def rows(self, rows):
        return LaneBatch(rows.stop - rows.start, self.held[rows], from_device=True)

    def batch(self, pytree):
        return LaneBatch(("host", len(pytree[0])), pytree[0], from_device=False) if self._stacks else None

    def __call__(self, lanes):
        if self.error is not None:
            raise self.error
        self.calls.append([float(lane.weights[0]) for lane in lanes])
        return [self._result(lane, lane.batches[0].content) for lane in lanes]

    def _result(self, lane, rows):
        return LaneResult(lane.weights + rows.sum(), [lane.state[0] + rows.sum()], [np.float32(len(rows))])

    def count(self, counted):
        return {"rows": counted[0]}


class Job:
    """Job whose data are the numbers from 0 to 99, in order."""

    first_update = 5

    def __init__(self, source):
        self.train = source

    def batch(self, source, task):
        return source.batch(slice(task.start, task.stop))

    def chosen(self, source, task, start, stop):
        return slice(start, stop)


def pending(step, most=8, source=None):
    return PendingGradients(step, Job(source or ArraySource({"tuple": [0]}, [ROWS])), most)


def add(gradients, weight, *rows):
    tasks = [Task(number, start, stop, samples=stop - start) for number, (start, stop) in enumerate(rows)]
    return gradients.add(Pulled(np.float32([weight]), (7,), 1), [np.float32(0)], tasks)


def test_the_first_result_brings_those_of_equal_batches_and_calls_have_few_widths():
    step = Step()
    gradients = pending(step)
    lanes = [add(gradients, weight, (0, 4)) for weight in range(5)]
    other = add(gradients, 9, (0, 3))
    (result,) = gradients.results(lanes[1])
    assert result.gradient == 1 + ROWS[:4].sum()
    assert step.calls == [[1, 0, 2, 3, 4, 1, 1, 1]]
    assert [gradients.results(lane)[0].gradient[0] for lane in lanes] == [weight + 6 for weight in range(5)]
    assert len(step.calls) == 1
    assert gradients.results(other)[0].gradient == 9 + 3
    assert step.calls[1:] == [[9]]
    assert lanes[0].version == 12


def test_a_call_is_at_most_as_wide_as_allowed():
    step = Step()
    gradients = pending(step, most=2)
    lanes = [add(gradients, weight, (0, 4)) for weight in range(3)]
    gradients.results(lanes[2])
    assert step.calls == [[2, 0]]
    gradients.results(lanes[1])
    assert step.calls[1:] == [[1]]


def test_the_gradients_of_a_group_are_computed_on_one_state_after_the_other():
    step = Step()
    gradients = pending(step)
    group, single = add(gradients, 1, (0, 2), (2, 5)), add(gradients, 2, (5, 8))
    results = gradients.results(group)
    assert [result.state[0] for result in results] == [1, 1 + 2 + 3 + 4]
    assert step.calls == [[1], [1, 2, 1, 1]]
    assert gradients.results(single)[0].state[0] == 5 + 6 + 7
    assert len(step.calls) == 2


def test_data_that_do_not_fit_on_the_device_are_stacked():
    step = Step(holds=False)
    gradients = pending(step)
    lane = add(gradients, 0, (2, 4))
    assert lane.batches[0].signature == ("host", 2)
    assert gradients.results(lane)[0].gradient == 5


@pytest.mark.parametrize(
    ("step", "source"), [(Step(holds=False, stacks=False), None), (Step(), SimpleNamespace(samples=100))]
)
def test_other_data_are_computed_one_by_one(step, source):
    assert add(pending(step, source=source), 0, (0, 4)) is None


def test_gradients_are_computed_one_by_one_after_a_failure(caplog):
    step = Step()
    gradients = pending(step)
    done, failed = add(gradients, 0, (0, 4)), add(gradients, 1, (0, 3))
    assert gradients.results(done)
    step.error = NotImplementedError("no vectorised form")
    assert gradients.results(failed) is None
    assert "one by one, as several at a time failed: no vectorised form" in caplog.text
    assert add(gradients, 2, (0, 4)) is None
    assert gradients.results(done)


def test_forgotten_gradients_are_not_computed():
    step = Step()
    gradients = pending(step)
    add(gradients, 0, (0, 4))
    gradients.clear()
    gradients.results(add(gradients, 1, (0, 4)))
    assert step.calls == [[1]]
