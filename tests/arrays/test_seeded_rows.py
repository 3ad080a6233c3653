"""Rows that follow from a seed: the same whichever part of a table is made, of the distributions of Keras."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.arrays.seeded_rows import BLOCK_ROWS, RowBlocks, SeededRows
from nfdt.core.errors import ProtocolError

UNIFORM = SeededRows("uniform", -0.5, 2.0, 7)


def rows(made, count, first=0, width=8):
    values = np.full((count, width), np.nan, np.float32)
    made.fill(values, first)
    return values


@pytest.mark.parametrize("distribution", ["uniform", "normal", "truncated_normal"])
def test_a_part_has_the_rows_of_the_whole(distribution):
    made = SeededRows(distribution, 0.0, 1.0, 3)
    whole = rows(made, 1000)
    for first, stop in [(0, 1), (255, 257), (256, 512), (3, 999)]:
        np.testing.assert_array_equal(rows(made, stop - first, first), whole[first:stop])
    assert len(np.unique(whole)) > 0.99 * whole.size
    assert not np.array_equal(rows(SeededRows(distribution, 0.0, 1.0, 4), 1000), whole)


def test_elements_have_the_distribution():
    uniform, normal = rows(UNIFORM, 20_000), rows(SeededRows("normal", 3.0, 2.0, -1), 20_000)
    assert -0.5 <= uniform.min() < -0.49
    assert 1.49 < uniform.max() <= 1.5
    assert abs(uniform.mean() - 0.5) < 0.01
    assert abs(normal.mean() - 3.0) < 0.02
    assert abs(normal.std() - 2.0) < 0.02
    truncated = rows(SeededRows("truncated_normal", 0.0, 1.0, 1), 20_000)
    assert np.abs(truncated).max() <= 2.0
    assert abs(truncated.std() - 0.8796) < 0.01
    assert (rows(SeededRows("uniform", 0.25, 0.0, 1), 300) == 0.25).all()


def test_blocks_of_a_part_begin_where_those_of_the_table_do():
    blocks = RowBlocks(first=BLOCK_ROWS + 10, size=2 * BLOCK_ROWS)
    assert blocks.count == 3
    assert [blocks.number(block) for block in range(3)] == [1, 2, 3]
    parts = [blocks.rows(block) for block in range(3)]
    assert [part.start for part in parts] == [0, BLOCK_ROWS - 10, 2 * BLOCK_ROWS - 10]
    assert [part.stop for part in parts] == [BLOCK_ROWS - 10, 2 * BLOCK_ROWS - 10, 2 * BLOCK_ROWS]
    assert blocks.rows(1, 3) == slice(BLOCK_ROWS - 10, 2 * BLOCK_ROWS)
    near_borders = np.array([0, BLOCK_ROWS - 11, BLOCK_ROWS - 10, 2 * BLOCK_ROWS - 1])
    assert blocks.of(near_borders).tolist() == [0, 1, 2]


def test_a_description_comes_back_and_is_checked():
    assert SeededRows.from_json(UNIFORM.to_json()) == UNIFORM
    for wrong in ({}, {**UNIFORM.to_json(), "distribution": "gamma"}, {**UNIFORM.to_json(), "seed": "x"}):
        with pytest.raises(ProtocolError, match="expected a distribution"):
            SeededRows.from_json(wrong)
