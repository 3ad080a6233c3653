from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.arrays import MAX_RANK, ParameterLayout
from nfdt.core.errors import ShapeMismatch, UsageError

shapes = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=12)
layouts = shapes.map(lambda found: ParameterLayout.of([(f"v{i}", shape) for i, shape in enumerate(found)]))


@given(layouts)
def test_variables_lie_one_after_the_other(layout):
    borders = [(s.start, s.stop) for s in layout.slots]
    assert borders[0][0] == 0
    assert [stop for _, stop in borders[:-1]] == [start for start, _ in borders[1:]]
    assert layout.size == sum(s.size for s in layout.slots) == borders[-1][1]


@given(layouts)
def test_flatten_and_unflatten_are_inverse(layout):
    flat = np.arange(layout.size, dtype=np.float32)
    arrays = layout.unflatten(flat)
    assert [a.shape for a in arrays] == [s.shape for s in layout.slots]
    assert np.array_equal(layout.flatten(arrays), flat)


@given(layouts)
def test_unflatten_gives_views(layout):
    flat = np.zeros(layout.size, np.float32)
    for array in layout.unflatten(flat):
        array += 1
    assert flat.all()


@given(layouts)
def test_json_keeps_the_layout(layout):
    assert ParameterLayout.from_json(layout.to_json()) == layout


@given(layouts, st.integers(1, 20))
def test_a_cut_covers_every_variable_once_and_leaves_no_shard_empty(layout, shards):
    cuts = layout.cut(shards)
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(len(layout.slots)))
    assert all(cut.stop > cut.start for cut in cuts)
    assert len(cuts) == min(shards, len(layout.slots))


@given(layouts, st.integers(1, 20))
def test_shards_are_runs_of_the_flat_vector(layout, shards):
    flat = np.arange(layout.size, dtype=np.float32)
    parts = [flat[slice(*layout.bounds(cut))] for cut in layout.cut(shards)]
    assert np.array_equal(np.concatenate(parts), flat)
    for part, cut in zip(parts, layout.cut(shards), strict=True):
        own = layout.select(cut)
        assert own.size == part.size
        assert [s.shape for s in own.slots] == [s.shape for s in layout.slots[cut]]


@given(st.integers(2, 40), st.integers(1, 8))
def test_equal_variables_are_shared_out_evenly(count, shards):
    layout = ParameterLayout.of([(f"v{i}", (7,)) for i in range(count)])
    sizes = [cut.stop - cut.start for cut in layout.cut(shards)]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_holds_at_most_its_share_and_one_variable_more():
    layout = ParameterLayout.of([(f"v{i}", (n,)) for i, n in enumerate([100, 1, 1, 1, 100, 3])])
    sizes = [stop - start for start, stop in map(layout.bounds, layout.cut(2))]
    assert sizes == [103, 103]


@pytest.mark.parametrize("shape", [(-1,), (1,) * (MAX_RANK + 1)])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(UsageError, match="Variable 'w'"):
        ParameterLayout.of([("w", shape)])


def test_a_cut_needs_at_least_one_shard():
    with pytest.raises(UsageError, match="shards"):
        ParameterLayout.of([("w", (1,))]).cut(0)


def test_other_shapes_are_refused():
    layout = ParameterLayout.of({"w": (2, 3)})
    with pytest.raises(ShapeMismatch, match="'w'"):
        layout.flatten([np.zeros((3, 2))])
    with pytest.raises(ShapeMismatch, match="1 arrays"):
        layout.flatten([])
    with pytest.raises(ShapeMismatch, match="6 elements"):
        layout.unflatten(np.zeros(5))
