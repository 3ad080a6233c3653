"""A model's tables: changed rows go into their variables, and gradients come back as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import Rows, RowVector, RowWeights, TableLayout, Vector

_ALIGNMENT = 64


class TableVariable:
    """One table's variable, whose rows are replaced between the steps of a model.

    TensorFlow replaces rows of a variable only at a price: from then on every read of it, once in each step, copies
    all of it. On a CPU the variable is therefore given memory of ours, and rows are written there.
    """

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._memory: Vector | None = None
        self._shares = variable.dtype == tf.float32 and "CPU" in variable.device

    def replace(self, values: Vector) -> None:
        """Other values for all rows; copied."""
        if self._shares:
            self._share(values)
        if not self._shares:
            self._variable.assign(tf.cast(tf.constant(values), self._variable.dtype))

    def update(self, first: int, rows: Rows | Vector) -> None:
        """Other values for some rows, numbered from ``first``; copied."""
        if self._shares and not self._has(self._memory):  # the script has assigned to it
            self._share(np.asarray(self._variable))
        index = rows.index + np.int32(first) if isinstance(rows, Rows) else np.arange(first, first + len(rows))
        values = rows.values if isinstance(rows, Rows) else rows
        if self._shares and self._memory is not None:
            self._memory[index] = values
        elif len(index):
            values = tf.cast(tf.constant(values), self._variable.dtype)
            self._variable.scatter_update(tf.IndexedSlices(values, tf.constant(index)))

    def _share(self, values: Vector) -> None:
        memory = _aligned(values)
        self._variable.assign(tf.experimental.dlpack.from_dlpack(memory.__dlpack__()))
        self._shares = self._has(memory)
        self._memory = memory if self._shares else None

    def _has(self, memory: Vector | None) -> bool:
        """Whether the variable lies in this memory."""
        held = np.frombuffer(memoryview(self._variable.read_value()), np.float32)
        return memory is not None and held.ctypes.data == memory.ctypes.data


class Tables:
    """Keeps the tables among a model's trainable variables, outside its traced step.

    Args:
        model: A built model.
        layout: Layout of the trainable variables.
        tables: Indices of the tables among the variables; each of rank 2.
    """

    def __init__(self, model: Any, layout: ParameterLayout, tables: Sequence[int]) -> None:
        variables = list(model.trainable_variables)
        self._variables = [TableVariable(variables[index].value) for index in tables]
        self._layout = TableLayout.of(layout, tables)

    def show(self, weights: Any) -> Vector:
        """Put the tables of these weights in place, and return the rest.

        ``weights`` is a whole flat vector, shape ``(P,)``, or a :class:`nfdt.core.arrays.table_rows.RowWeights`.
        """
        if not isinstance(weights, RowWeights):
            for variable, values in zip(self._variables, self._layout.views(weights), strict=True):
                variable.replace(values)
            return self._layout.dense(weights)
        for news in weights.take():
            variable, table = self._variables[news.table], self._layout.tables[news.table]
            if isinstance(news.rows, Rows) or len(news.rows) < table.rows:
                variable.update(news.first, news.rows)
            else:
                variable.replace(news.rows)
        return weights.dense

    def gradient(self, vector: Any, index: Sequence[Any]) -> RowVector:
        """Recorded gradient of a step: ``vector`` with the tables' rows at its end, and the rows' numbers."""
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
    """A copy in memory that TensorFlow can use as it is."""
    raw = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    copy = raw[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    np.copyto(copy, values)
    return copy
