from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdt.rows import learning_rate_factor, split_rows, weight_of


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


@pytest.mark.parametrize(("kind", "full"), [(None, 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_factor_of_the_learning_rate(kind, full):
    assert learning_rate_factor(kind, 4, 0, 0) == full
    assert learning_rate_factor(kind, 4, 100, 10) == full


def test_warm_up_rises_from_about_one_to_the_full_factor():
    factors = [learning_rate_factor("linear", 8, step, 10) for step in range(12)]
    assert 1.0 < factors[0] < 2.0
    assert factors == sorted(factors)
    assert factors[10] == factors[11] == 8.0
