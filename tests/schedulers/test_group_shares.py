"""Shares of groups: every row goes to one group, and rates add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.work.member_rows import row_unit
from nfdt.schedulers.group_shares import share_out
from nfdt.schedulers.grouping import choose
from nfdt.schedulers.throughput import StepTime

TIME = st.builds(StepTime, st.floats(0, 0.5), st.floats(0.001, 0.1))


def even(*seconds, rows=32):
    return {i: StepTime(0.0, s / rows) for i, s in enumerate(seconds)}


@given(
    times=st.lists(TIME, min_size=1, max_size=8),
    local=st.integers(1, 256),
    proportional=st.booleans(),
)
def test_totals(times, local, proportional):
    groups = choose([t.seconds(local) for t in times])
    found = share_out(groups, dict(enumerate(times)), local, proportional=proportional)
    assert sum(share.batch for share in found) == local * len(times)
    assert all(rows >= 1 for share in found for rows in share.rows)
    assert [share.members for share in found] == list(groups)
    raw = [share.rate / min(1, len(found) / (1 + share.staleness)) for share in found]
    assert sum(raw) == pytest.approx(len(found))
    # Groups that are always busy miss G - 1 updates on average, at any speeds.
    pushes = [1 / share.step_s for share in found]
    mean = sum(share.staleness * n for share, n in zip(found, pushes, strict=True)) / sum(pushes)
    assert mean == pytest.approx(len(found) - 1, abs=1e-6)


def test_one_group_is_one_synchronous_worker():
    (share,) = share_out(((0, 1, 2),), even(1, 1, 1), 32, proportional=True)
    assert (share.rows, share.rate, share.staleness, share.batch) == ((32, 32, 32), 1, 0, 96)


def test_proportional_rows_even_the_steps_of_all_groups_out():
    fast, slow = share_out(((0, 1), (2, 3)), even(1, 1, 4, 4), 32, proportional=True)
    assert fast.rows == (52, 52)  # 51.2 of 32, in steps of 2
    assert slow.rows == (12, 12)
    assert fast.step_s == pytest.approx(slow.step_s, rel=0.1)
    assert fast.rate == pytest.approx(2 * 104 / 128, rel=0.1)
    assert slow.rate == pytest.approx(2 * 24 / 128, rel=0.1)


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=40), st.sampled_from([96, 100, 128, 13]))
def test_rows_take_few_values_at_any_speeds(betas, batch):
    groups = (tuple(range(len(betas) // 2)), tuple(range(len(betas) // 2, len(betas))))
    times = {member: StepTime(0.0, beta) for member, beta in enumerate(betas)}
    shares = share_out(groups, times, batch, proportional=True)
    unit = row_unit(batch)
    assert all(rows % unit == 0 and rows for share in shares for rows in share.rows)
    assert sum(share.batch for share in shares) == batch * len(betas)
    assert unit in (6, 5, 8, 1)


def test_with_fixed_batches_a_slow_group_s_rate_shrinks_with_its_staleness():
    fast, slow = share_out(((0, 1), (2, 3)), even(1, 1, 4, 4), 32, proportional=False)
    assert (fast.rows, slow.rows) == ((32, 32), (32, 32))
    assert (fast.staleness, slow.staleness) == (pytest.approx(0.25), pytest.approx(4))
    assert (fast.rate, slow.rate) == (pytest.approx(1), pytest.approx(2 / 5))


def test_members_of_a_group_end_a_step_together():
    times = {0: StepTime(0.0, 0.01), 1: StepTime(0.1, 0.01), 2: StepTime(0.0, 0.012)}
    (share,) = share_out(((0, 1, 2),), times, 32, proportional=True)
    seconds = [times[member].seconds(rows) for member, rows in zip(share.members, share.rows, strict=True)]
    assert max(seconds) - min(seconds) <= 2 * 0.012, "rows in steps of 2"
