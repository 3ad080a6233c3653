"""Accumulation of the gradients of several passes on this rank before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Accumulation:
    """Sum of the gradients of ``passes`` calls; the last call passes the sum on.

    The sums are variables of this rank: neither saved nor broadcast. Training that ends between two updates drops the
    gradients accumulated since the last one.

    Args:
        passes: Calls per update, at least 2.
        average: Divide the sum by ``passes``.
    """

    def __init__(self, passes: int, *, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._done: Any = None
        self._sums: dict[int, Any] = {}

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[list[Any]], None],
        skip: Callable[[], None],
    ) -> None:
        """Add the gradients of one pass; then call ``update`` with the sums after the last pass, else ``skip``.

        Args:
            gradients: Gradients of the same variables in the same order at each call. Sparse ones become dense.
            variables: The variable of each gradient.
            update: Receives the sums, None for variables without a gradient.
            skip: Runs in the passes that only accumulate.
        """
        self._prepare(gradients, variables)
        sums = {i: self._sums[i] for i, gradient in enumerate(gradients) if gradient is not None}
        for i, total in sums.items():
            total.assign_add(tf.convert_to_tensor(gradients[i]))
        self._done.assign_add(1)
        divisor = self._passes if self._average else 1

        def finish() -> None:
            update([sums[i] / divisor if i in sums else None for i in range(len(gradients))])
            for total in (*sums.values(), self._done):
                total.assign(tf.zeros_like(total))

        tf.cond(self._done >= self._passes, finish, skip)

    def _prepare(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._done is None:
                self._done = tf.Variable(0, trainable=False)
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if gradient is not None and i not in self._sums:
                    self._sums[i] = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
