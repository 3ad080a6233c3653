"""Samples of groups per step: given sizes, and the bounds of each member."""

from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.group_shares import FixedSizes, share_out
from nfdt.schedulers.throughput import Speeds, StepTime


def test_sizes_are_what_was_stated_last_and_the_reference_for_others():
    sizes = FixedSizes(32)
    assert sizes.of("0,1") == 32
    stated = {"0,1": 50, "2": 14}
    sizes.state(stated)
    stated["0,1"] = 1
    assert [sizes.of(worker) for worker in ("0,1", "2", "3")] == [50, 14, 32]
    sizes.state({"3": 8})
    assert [sizes.of(worker) for worker in ("0,1", "2", "3")] == [32, 32, 8]


def test_steps_change_no_stated_size():
    sizes, speeds = FixedSizes(32), Speeds()
    sizes.joined("a")
    for _ in range(50):
        speeds.measured("a", 32, 9.0)
        assert not sizes.stepped("a", speeds)
    assert sizes.of("a") == 32


def test_a_round_is_divided_by_the_sizes_of_those_who_are_there():
    sizes = FixedSizes(10)
    for worker in ("b", "a", "gone"):
        sizes.joined(worker)
    sizes.left("gone")
    sizes.left("unknown")
    sizes.state({"a": 30, "gone": 99})
    assert sizes.split(40) == [("a", 30), ("b", 10)]
    assert sizes.split(8) == [("a", 6), ("b", 2)]
    assert sizes.split(1) == [("a", 1)]


@given(
    st.lists(st.builds(StepTime, st.floats(0, 0.5), st.floats(0.001, 0.1)), min_size=3, max_size=6),
    st.integers(1, 32),
    st.integers(32, 60),
)
def test_no_member_takes_fewer_rows_than_the_least_or_more_than_the_most(times, least, most):
    groups = (tuple(range(2)), tuple(range(2, len(times))))
    shares = share_out(groups, dict(enumerate(times)), 32, proportional=True, least=least, most=most)
    assert all(least <= rows <= most for share in shares for rows in share.rows)
    assert sum(share.batch for share in shares) == 32 * len(times)
