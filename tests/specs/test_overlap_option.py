"""Overlap of pushes: 0, 1 or 2, and only where steps do not wait for each other."""

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS

STEPS_WAIT = {
    "bsp": "every step waits",
    "diloco": "every step waits",
    "allreduce": "on a ring",
    "group-sync": "with groups",
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_whose_steps_do_not_wait_can_overlap(name):
    if name in STEPS_WAIT:
        with pytest.raises(UsageError, match=rf"overlap: expected 0 .*{STEPS_WAIT[name]}.* Received: 1"):
            resolve_algorithm(name, overlap=1)
    else:
        assert [resolve_algorithm(name, overlap=depth).overlap for depth in (0, 1, 2)] == [0, 1, 2]


@pytest.mark.parametrize("depth", [-1, 3])
def test_other_depths_are_refused(depth):
    with pytest.raises(UsageError, match=rf"overlap: .* Received: {depth}"):
        resolve_algorithm("asgd", overlap=depth)


def test_a_row_of_one_s_own_with_a_barrier_is_refused_too():
    with pytest.raises(UsageError, match="overlap: expected 0 with consistency 'bsp'"):
        resolve_algorithm("ddc-asgd", consistency="bsp", overlap=2)
