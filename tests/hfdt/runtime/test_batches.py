from __future__ import annotations

import pytest

from nfdt.core.work.tasks import Task

pytest.importorskip("horovod")

from hfdt.runtime.job import global_batches


def test_tasks_that_name_rows_are_a_step_each():
    tasks = [Task(task=i, start=32 * i, stop=32 * i + 32, parts=1) for i in range(3)]
    assert [len(group) for group in global_batches(tasks)] == [1, 1, 1]


def test_the_fed_batches_of_a_round_are_one_step():
    numbers = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    tasks = [Task(task=i, start=0, stop=1, round=r, part=p, data=b"x") for i, (r, p) in enumerate(numbers)]
    assert [[t.task for t in group] for group in global_batches(tasks)] == [[0, 1], [2, 3], [4]]
