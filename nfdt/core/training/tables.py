"""A model's tables: changed rows go into their variables, and gradients come back as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.arrays import ParameterLayout
from nfdt.core.rows import News, Rows, RowVector, RowWeights, TableLayout, Vector


class Tables:
    """Keeps the tables among a model's trainable variables, outside its traced step.

    Args:
        model: A built model.
        layout: Of its trainable variables.
        tables: Which of them, by index; each of rank 2.
    """

    def __init__(self, model: Any, layout: ParameterLayout, tables: Sequence[int]) -> None:
        variables = list(model.trainable_variables)
        self._variables = [variables[index] for index in tables]
        self._layout = TableLayout.of(layout, tables)

    def show(self, weights: Any) -> Vector:
        """Put the tables of these weights in place, and return the rest.

        ``weights`` is a whole flat vector, shape ``(P,)``, or a :class:`nfdt.core.rows.RowWeights`.
        """
        if not isinstance(weights, RowWeights):
            for table, values in enumerate(self._layout.views(weights)):
                self._put(News(table, 0, values))
            return self._layout.dense(weights)
        for news in weights.take():
            self._put(news)
        return weights.dense

    def gradient(self, vector: Any, index: Sequence[Any]) -> RowVector:
        """What a step recorded: ``vector`` with the tables' rows at its end, and the rows' numbers."""
        flat = np.asarray(vector)
        at = self._layout.dense_size
        rows = []
        for table, numbers in zip(self._layout.tables, index, strict=True):
            count = int(numbers.shape[0])
            values = flat[at : at + count * table.width].reshape(count, table.width)
            rows.append(Rows.summed(np.asarray(numbers), values))
            at += values.size
        return RowVector(flat[: self._layout.dense_size], tuple(rows))

    def _put(self, news: News) -> None:
        variable, rows = self._variables[news.table].value, news.rows
        if isinstance(rows, Rows):
            if rows.index.size:
                values = tf.cast(tf.constant(rows.values), variable.dtype)
                variable.scatter_update(tf.IndexedSlices(values, tf.constant(rows.index + np.int32(news.first))))
        elif len(rows) == variable.shape[0]:
            variable.assign(tf.cast(tf.constant(rows), variable.dtype))
        else:
            variable[news.first : news.first + len(rows)].assign(tf.cast(tf.constant(rows), variable.dtype))
