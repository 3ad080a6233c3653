"""Sets of rows as ranges."""

from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.ranges import RowSet

RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20)))


def rows_of(ranges):
    return {(pass_index, row) for pass_index, begin, end in ranges for row in range(begin, end)}


@given(ranges=RANGES)
def test_the_ranges_are_sorted_disjoint_and_do_not_touch(ranges):
    found = RowSet(ranges).ranges
    assert rows_of(found) == rows_of(ranges)
    assert all(begin < end for _, begin, end in found)
    for (pass_a, _, end), (pass_b, begin, _) in zip(found, found[1:], strict=False):
        assert (pass_a, end) < (pass_b, begin)


@given(ranges=RANGES, pass_index=st.integers(0, 2), begin=st.integers(0, 20), end=st.integers(0, 20))
def test_missing_rows_are_those_that_the_set_lacks(ranges, pass_index, begin, end):
    gaps = RowSet(ranges).missing(pass_index, range(begin, end))
    assert all(gap for gap in gaps)
    assert [row for gap in gaps for row in gap] == [
        row for row in range(begin, end) if (pass_index, row) not in rows_of(ranges)
    ]
