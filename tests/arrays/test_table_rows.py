from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import ChangedRows, Rows, RowVector, RowWeights, TableLayout
from nfdt.core.errors import ProtocolError, ShapeMismatch

LAYOUT = ParameterLayout.of([("a", (3,)), ("table", (6, 2)), ("b", (2, 2)), ("other", (4, 3))])
TABLES = TableLayout.of(LAYOUT, (1, 3))


def numbers(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def vector(first=(0, 4), second=(1, 2, 3)):
    rows = [Rows(np.array(index, np.int32), numbers((len(index), width))) for index, width in ((first, 2), (second, 3))]
    return RowVector(numbers(7), tuple(rows))


@given(st.lists(st.integers(0, 9), max_size=30).map(lambda few: few + [7] * 40 * (3 in few)))
def test_rows_of_one_index_are_added_up(index):
    values = numbers((len(index), 3)) + 5
    rows = Rows.summed(np.array(index, np.int64), values)
    dense = np.zeros((10, 3), np.float32)
    np.add.at(dense, index, values)
    assert rows.index.tolist() == sorted(set(index))
    assert rows.index.dtype == np.int32
    np.testing.assert_allclose(rows.values, dense[rows.index], rtol=1e-5)


def test_zero_rows_are_left_out_and_what_is_not_finite_is_kept():
    rows = Rows.summed(np.array([3, 1, 2]), np.array([[0, 0], [np.nan, 0], [1, 0]], np.float32))
    assert rows.index.tolist() == [1, 2]
    assert not RowVector(numbers(1), (rows,)).finite


def test_rows_of_a_part_are_counted_from_its_first():
    rows = Rows(np.array([0, 2, 5, 9], np.int32), numbers((4, 2)))
    own = rows.within(2, 9)
    assert own.index.tolist() == [0, 3]
    assert np.array_equal(own.values, rows.values[1:3])


def test_a_vector_is_tables_and_a_dense_rest():
    flat = numbers(LAYOUT.size)
    dense, tables = TABLES.dense(flat), TABLES.views(flat)
    assert (TABLES.dense_size, dense.size, [t.shape for t in tables]) == (7, 7, [(6, 2), (4, 3)])
    assert np.array_equal(TABLES.join(dense, tables), flat)
    everything = TableLayout.of(ParameterLayout.of([("t", (3, 2))]), (0,))
    assert everything.dense(flat[:6]).size == 0
    assert np.array_equal(everything.join(flat[:0], everything.views(flat[:6])), flat[:6])


def test_bytes_give_the_vector_back():
    sent = vector()
    payload = TABLES.encode(sent)
    found = TABLES.decode(payload)
    assert payload.size == 4 * (7 + 2 + 2 + 2 * 2 + 3 + 3 * 3) <= TABLES.payload_bytes
    assert np.array_equal(found.dense, sent.dense)
    for own, other in zip(found.rows, sent.rows, strict=True):
        assert np.array_equal(own.index, other.index)
        assert np.array_equal(own.values, other.values)


@pytest.mark.parametrize("index", [(4, 4), (4, 0), (0, 6), (-1, 2)])
def test_rows_out_of_place_are_refused(index):
    with pytest.raises(ProtocolError, match="rising numbers below 6"):
        TABLES.decode(TABLES.encode(vector(index)))


@given(st.data())
def test_forged_bytes_are_refused_or_decode_to_valid_rows(data):
    payload = np.array(TABLES.encode(vector()))
    payload = payload[: data.draw(st.integers(0, payload.size))]
    for _ in range(data.draw(st.integers(0, 4))):
        if payload.size:
            payload[data.draw(st.integers(0, payload.size - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError, ShapeMismatch):
        found = TABLES.decode(payload)
        for rows, table in zip(found.rows, TABLES.tables, strict=True):
            assert rows.values.shape == (rows.index.size, table.width)
            assert set(rows.index.tolist()) <= set(range(table.rows))


def test_too_many_bytes_are_refused():
    with pytest.raises(ShapeMismatch, match="another model"):
        TABLES.decode(np.concatenate([TABLES.encode(vector()), np.zeros(4, np.uint8)]))


def test_news_are_taken_once():
    news = [ChangedRows(0, 0, numbers((2, 2)))]
    weights = RowWeights(numbers(1), news)
    assert len(weights.pop_changes()) == 1
    assert not news
    assert not weights.pop_changes()
