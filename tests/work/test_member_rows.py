"""Division of a group's batch among its members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.work.member_rows import member_rows, row_unit

SHARES = st.lists(st.integers(1, 200), min_size=1, max_size=8)
IN_UNITS = st.lists(st.integers(1, 25).map(lambda units: 8 * units), min_size=2, max_size=8)


@given(st.integers(0, 10_000), st.integers(0, 2_000), SHARES | IN_UNITS)
def test_every_row_of_a_group_s_batch_has_one_member(start, rows, shares):
    parts = member_rows(start, start + rows, shares)
    assert parts[0][0] == start
    assert parts[-1][1] == start + rows
    assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))
    unit = row_unit(max(shares), *shares, parts=4)
    assert all(abs(b - a - rows * s / sum(shares)) < 1 + unit for (a, b), s in zip(parts, shares, strict=True))
    assert all((b - a) % unit == 0 for a, b in parts[:-1])


@given(SHARES | IN_UNITS)
def test_a_whole_batch_gives_every_member_its_share(shares):
    assert [b - a for a, b in member_rows(7, 7 + sum(shares), shares)] == shares
