"""Embedding tables of a model: writes changed rows to their variables, and returns gradients as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import Rows, RowVector, RowWeights, TableLayout, Vector

_ALIGNMENT = 64


class TableVariable:
    """Variable of one table; its rows are replaced between the steps of a model.

    After TensorFlow has replaced rows of a variable, every later read, one in each step, copies the whole variable. On
    a CPU the variable therefore uses memory that this class allocates, and rows are written there directly.
    """

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._memory: Vector | None = None
        self._shares = variable.dtype == tf.float32 and "CPU" in variable.device

    def replace(self, values: Vector) -> None:
        """Replace the values of all rows by a copy of ``values``."""
        if self._shares:
            self._share(values)
        if not self._shares:
            self._variable.assign(tf.cast(tf.constant(values), self._variable.dtype))

    def update(self, first: int, rows: Rows | Vector) -> None:
        """Replace the values of some rows, numbered from ``first``, by a copy of ``rows``."""
        if self._shares and not self._has(self._memory):  # the script has assigned to the variable
            self._share(np.asarray(self._variable))
        index = rows.index + np.int32(first) if isinstance(rows, Rows) else np.arange(first, first + len(rows))
        values = rows.values if isinstance(rows, Rows) else rows
        if self._shares and self._memory is not None:
            self._memory[index] = values  # in place: the variable sees it without a copy
        elif len(index):
            values = tf.cast(tf.constant(values), self._variable.dtype)
            self._variable.scatter_update(tf.IndexedSlices(values, tf.constant(index)))

    def _share(self, values: Vector) -> None:
        memory = _aligned(values)
        self._variable.assign(tf.experimental.dlpack.from_dlpack(memory.__dlpack__()))
        self._shares = self._has(memory)
        self._memory = memory if self._shares else None

    def _has(self, memory: Vector | None) -> bool:
        """Return whether the variable uses this memory."""
        held = np.frombuffer(memoryview(self._variable.read_value()), np.float32)
        return memory is not None and held.ctypes.data == memory.ctypes.data


class Tables:
    """The tables among a model's trainable variables, kept outside its traced step.

    Args:
        model: A built model.
        layout: Layout of the trainable variables.
        tables: Indices of the tables among the variables; each of rank 2.
    """

    def __init__(self, model: Any, layout: ParameterLayout, tables: Sequence[int]) -> None:
        variables = list(model.trainable_variables)
        self._variables = [TableVariable(variables[index].value) for index in tables]
        self._layout = TableLayout.of(layout, tables)

    def assign(self, weights: Any) -> Vector:
        """Write the tables of these weights to their variables, and return the other weights.

        ``weights`` is a whole flat vector, shape ``(P,)``, or a :class:`nfdt.core.arrays.table_rows.RowWeights`.
        """
        if not isinstance(weights, RowWeights):
            for variable, values in zip(self._variables, self._layout.views(weights), strict=True):
                variable.replace(values)
            return self._layout.dense(weights)
        for news in weights.pop_changes():
            variable, table = self._variables[news.table], self._layout.tables[news.table]
            if isinstance(news.rows, Rows) or len(news.rows) < table.rows:
                variable.update(news.first, news.rows)
            else:
                variable.replace(news.rows)
        return weights.dense

    def gradient(self, vector: Any, index: Sequence[Any]) -> RowVector:
        """Build a step's gradient from the recorded ``vector``, with the tables' rows at its end, and row numbers."""
        flat = np.asarray(vector)
        at = self._layout.dense_size
        rows = []
        for table, numbers in zip(self._layout.tables, index, strict=True):
            count = int(numbers.shape[0])
            values = flat[at : at + count * table.width].reshape(count, table.width)
            rows.append(Rows.summed(np.asarray(numbers), values))
            at += values.size
        return RowVector(flat[: self._layout.dense_size], tuple(rows))


def _aligned(values: Vector) -> Vector:
    """Return a copy in aligned memory, which TensorFlow can use without copying."""
    raw = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    copy = raw[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    np.copyto(copy, values)
    return copy
