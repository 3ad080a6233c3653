from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.arrays.layout import MAX_RANK, MAX_SURPLUS, ParameterLayout
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
    runs = layout.cut(shards)
    assert [piece.variable for run in runs for piece in run.pieces] == list(range(len(layout.slots)))
    assert all(run.pieces and all(piece.whole for piece in run.pieces) for run in runs)
    assert len(runs) == min(shards, len(layout.slots))


@given(layouts, st.integers(1, 20), st.booleans())
def test_shards_are_runs_of_the_flat_vector(layout, shards, divisible):
    layout = replace(layout, divisible=divisible)
    flat = np.arange(layout.size, dtype=np.float32)
    parts = [flat[run.elements] for run in layout.cut(shards)]
    assert np.array_equal(np.concatenate(parts), flat)
    for part, run in zip(parts, layout.cut(shards), strict=True):
        assert run.layout.size == part.size
        assert [s.name for s in run.layout.slots] == [piece.slot.name for piece in run.pieces]


@given(st.integers(2, 40), st.integers(1, 8))
def test_equal_variables_are_shared_out_evenly(count, shards):
    layout = ParameterLayout.of([(f"v{i}", (7,)) for i in range(count)])
    sizes = [len(run.pieces) for run in layout.cut(shards)]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_holds_at_most_its_share_and_one_variable_more():
    layout = ParameterLayout.of([(f"v{i}", (n,)) for i, n in enumerate([100, 1, 1, 1, 100, 3])])
    assert [run.size for run in layout.cut(2)] == [103, 103]


large = st.lists(st.integers(0, 10**6), max_size=3).map(lambda shape: shape[:1] + [1 + n % 300 for n in shape[1:]])


@given(st.lists(large, min_size=1, max_size=12), st.integers(1, 8))
def test_divisible_shards_are_within_a_twentieth_of_their_share(shapes, shards):
    layout = replace(ParameterLayout.of([(f"v{i}", s) for i, s in enumerate(shapes)]), divisible=True)
    runs = layout.cut(shards)
    share = layout.size / shards
    assert max(run.size for run in runs) <= share + max(0.05 * share, MAX_SURPLUS)
    covered = [(p.variable, p.start, p.stop) for run in runs for p in run.pieces]
    for index, slot in enumerate(layout.slots):
        own = [(start, stop) for variable, start, stop in covered if variable == index]
        assert own[0][0] == 0
        assert own[-1][1] == slot.size
        assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]


def test_a_table_is_cut_between_rows_and_one_long_row_within_it():
    table = ParameterLayout.of({"table": (1000, 64), "bias": (10,)})
    shapes = [[p.shape for p in run.pieces] for run in replace(table, divisible=True).cut(3)]
    assert shapes == [[(336, 64)], [(336, 64)], [(328, 64), (10,)]]
    assert [run.size for run in table.cut(3)] == [64000, 10]
    row = replace(ParameterLayout.of({"row": (1, 30_001)}), divisible=True)
    assert [run.layout.slots[0].shape for run in row.cut(2)] == [(15_000,), (15_001,)]


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
