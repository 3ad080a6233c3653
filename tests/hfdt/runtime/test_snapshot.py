from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("horovod")

from hfdt.runtime.elastic.job import Snapshot
from nfdt.model.program.state import State
from nfdt.model.training import merge


def test_a_snapshot_survives_the_way_to_another_rank():
    one = Snapshot(
        commit=4,
        state=State(np.arange(5, dtype=np.float32), {0: np.asarray(7), 2: np.ones((2, 3), np.float32)}),
        untrained=[np.zeros(3, np.float32), np.asarray([1, 2], np.uint32)],
        base=[np.ones(3, np.float32), np.asarray([1, 0], np.uint32)],
        counters={"epoch": 2, "steps": 40, "samples": 1280},
        own={"epoch_samples": 3, "epoch_steps": 2},
        metrics={0: merge.encode_arrays([np.float32(2.5)]), 3: merge.encode_arrays([np.float32(1.5)])},
        orphans=(merge.encode_arrays([np.float32(0.5)]),),
        answer=b"\x00\xff",
    )
    other = Snapshot.decode(one.encode())
    assert (other.commit, other.counters, other.answer) == (one.commit, one.counters, one.answer)
    assert (other.metrics, other.orphans) == (one.metrics, one.orphans)
    assert other.own == {}
    np.testing.assert_array_equal(other.state.weights, one.state.weights)
    assert set(other.state.optimizer) == {0, 2}
    for mine, theirs in zip([*one.untrained, *one.base], [*other.untrained, *other.base], strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
