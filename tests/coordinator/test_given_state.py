"""Values that only the script changes are passed through as bytes of any number, up to a limit."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.coordinator.untrained import StateMerger
from nfdt.core.errors import ShapeMismatch
from nfdt.model.training.merge import MOST_GIVEN_BYTES, decode_arrays, encode_arrays

RULES = [{"rule": "mean", "decay": None}, {"rule": "given", "decay": None}]
MEAN, NOTHING, DATA = np.zeros(2, "f4"), np.zeros(0, np.uint8), np.arange(5, dtype=np.uint8)


def test_it_is_the_last_that_was_given_whatever_workers_send():
    merger = StateMerger(RULES, [MEAN, NOTHING])
    assert merger.encoded == b""
    merger.check({0: MEAN, 1: DATA})
    merger.replace([MEAN, DATA])
    merger.show([(worker, 1, encode_arrays([MEAN + worker, DATA], [1])) for worker in (0, 2)], b"")
    merger.settle()
    mean, given = decode_arrays(merger.encoded)
    assert mean.tolist() == [1.0, 1.0]
    assert given.tobytes() == DATA.tobytes()


def test_a_restarted_job_gives_its_workers_what_its_state_has():
    assert StateMerger(RULES, [MEAN, NOTHING]).encoded == b""
    large = np.zeros(MOST_GIVEN_BYTES, np.uint8)
    assert len(StateMerger(RULES, [MEAN, large]).encoded) > large.nbytes


@pytest.mark.parametrize(
    "untrained",
    [
        {0: MEAN},
        {0: MEAN[:1], 1: DATA},
        {0: MEAN, 1: DATA.astype("f4")},
        {0: MEAN, 1: DATA[None]},
        {0: MEAN, 1: np.zeros(MOST_GIVEN_BYTES + 1, np.uint8)},
    ],
    ids=["none", "another model", "no bytes", "no vector", "too many"],
)
def test_other_states_are_refused(untrained):
    with pytest.raises(ShapeMismatch):
        StateMerger(RULES, [MEAN, NOTHING]).check(untrained)
