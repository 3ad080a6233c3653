from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdt.runtime.batch_split import cut_rows, split_rows, weight_of


@given(st.integers(0, 10_000), st.integers(0, 2_000), st.integers(1, 64))
def test_every_row_of_a_batch_has_one_rank(start, rows, size):
    parts = [split_rows(start, start + rows, size, rank) for rank in range(size)]
    assert parts[0][0] == start
    assert parts[-1][1] == start + rows
    assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))


@given(st.integers(0, 2_000), st.integers(1, 64))
def test_parts_differ_by_one_row_at_most_and_weigh_one_together(rows, size):
    parts = [split_rows(0, rows, size, rank) for rank in range(size)]
    counts = [stop - start for start, stop in parts]
    assert max(counts) - min(counts) <= 1
    assert sum(weight_of(n, rows) for n in counts) == pytest.approx(1.0 if rows else 0.0)


@pytest.mark.parametrize("most", [1, 7, 48, 200])
def test_rows_are_cut_into_steps_of_equal_size_every_row_once(most):
    ranges = [(0, 64, 128), (0, 128, 192), (0, 192, 203), (1, 0, 64), (1, 80, 90)]
    cuts = cut_rows(ranges, most)
    rows = [(number, row) for number, start, stop in cuts for row in range(start, stop)]
    assert rows == [(number, row) for number, start, stop in ranges for row in range(start, stop)]
    assert max(stop - start for _, start, stop in cuts) <= most
    first = [stop - start for number, start, stop in cuts if number == 0]
    assert max(first) - min(first) <= 1
