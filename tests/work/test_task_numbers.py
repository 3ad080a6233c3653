"""Sets of task numbers: like sets, with as many ranges as there are gaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.work.tasks import TaskNumbers

NUMBERS = st.lists(st.integers(0, 30), max_size=60)


@given(first=NUMBERS, then=NUMBERS)
def test_a_set_of_numbers_is_a_set_also_after_a_copy(first, then):
    numbers = TaskNumbers()
    for number in first:
        numbers.add(number)
    numbers = TaskNumbers(numbers.to_array())
    for number in then:
        numbers.add(number)
    wanted = {*first, *then}
    assert [number in numbers for number in range(32)] == [number in wanted for number in range(32)]
    ranges = numbers.to_array()
    assert len(ranges) == sum(number not in wanted for number in (each - 1 for each in wanted))
    assert np.all(ranges[:, 0] < ranges[:, 1])
    assert np.all(ranges[1:, 0] > ranges[:-1, 1])


@pytest.mark.parametrize("order", [range(10_000), reversed(range(10_000))])
def test_consecutive_numbers_are_one_range(order):
    numbers = TaskNumbers()
    for number in order:
        numbers.add(number)
    assert numbers.to_array().tolist() == [[0, 10_000]]
