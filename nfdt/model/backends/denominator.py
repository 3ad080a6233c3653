"""The denominator of a loss, with which the gradients of several batches combine to that of their union.

A loss of ``compile`` is ``N / D``: the sum ``N`` over the elements of a batch by a denominator ``D``. The gradient of a
union of batches is therefore ``sum(D_i g_i) / sum(D_i)``, and for sums, which are not divided, ``sum(g_i)``. Keras 3
divides (``keras/src/losses/loss.py``) by

=================================  ==========================================================  ====================
``reduction``                      denominator                                                 here
=================================  ==========================================================  ====================
"sum_over_batch_size", "mean"      the number of elements, weighted or not                     number of samples
the same, with a mask              the number of elements that the mask leaves                 that number
"mean_with_sample_weight"          the sum of the weights, and of the mask; without both, of   that sum, or the
                                   the elements                                                number of samples
"sum", "none", None                1                                                           :data:`SUM`
=================================  ==========================================================  ====================

Regularizers and ``add_loss`` are not divided: they are part of ``g_i``, and of a mean once. Beside a sum they would be
added once per batch, and the metric ``loss`` would be that of a part. A batch that is a known share of a union
therefore multiplies its sums by ``1 / share``, and its whole gradient by ``share``. Likewise for sums beside means.

Several means with different denominators (two masks), and losses whose functions return one number, combine by samples.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import keras

from nfdt.model.keras_internals.training import compiled_loss, observed_reductions, sum_of_weights

logger = logging.getLogger(__name__)

SUM = math.inf
"""Denominator of a sum: gradients of several batches are added, not averaged."""

LEAST = 1e-20
"""Denominator of a batch whose weights are all zero: small enough not to count beside any other batch."""


class LossDenominator:
    """Finds the denominator of a model's compiled loss in every trace of a step (in every step of an eager model).

    Losses that are means over samples, the common case, add nothing to a trace.

    Args:
        model: A compiled model; the call of its compiled loss is observed from now on.
    """

    def __init__(self, model: Any) -> None:
        self._found: dict[Any, Any] = {}
        self._factor: Any = None
        self._kept: list[Any] = []
        self._warned = False
        if (loss := compiled_loss(model)) is not None:
            loss.call = functools.partial(self._called, functools.partial(type(loss).call, loss))

    def begin_step(self, factor: Any) -> None:
        """Begin a step; sums are multiplied by ``factor``, a number or a 0-d tensor: ``1 / share`` of the batch."""
        self._found.clear()
        self._kept.clear()
        self._factor = factor

    def end_step(self) -> Any:
        """End a step; return the denominator: None for the number of samples, :data:`SUM`, or a 0-d float32 tensor."""
        found = list(self._found.values())
        self._found.clear()  # tensors of a graph must not outlive its trace
        self._kept.clear()
        self._factor = None
        if not any(keras.ops.is_tensor(each) for each in found):
            return SUM if SUM in found else None
        if len(found) > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "The losses have several denominators: masks, weights or sums that differ. Where the gradients of "
                "several batches form one update, they are weighted by samples."
            )
        return found[0] if len(found) == 1 else None

    def _called(self, call: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._factor is None:  # an evaluation
            return call(y_true, y_pred, sample_weight)
        with observed_reductions(self._reduced):
            return call(y_true, y_pred, sample_weight)

    def _reduced(self, loss: Any, shape: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
        """Record the denominator of a loss, and return the loss; a sum is multiplied by the factor."""
        if not len(shape):  # the loss function has reduced by itself
            self._found["samples"] = None
        elif reduction in (None, "none", "sum"):
            self._found["sum"] = SUM
            # Scaled before the backward pass, so that regularizers, which are not divided, count once (decision 66).
            return loss * keras.ops.cast(self._factor, loss.dtype)
        elif reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            self._count(("weights", id(sample_weight), id(mask)), sample_weight, mask, reduction)
        elif mask is not None:
            self._count(("mask", id(mask)), None, mask, "mean_with_sample_weight")
        else:
            self._found["samples"] = None
        return loss

    def _count(self, key: Any, sample_weight: Any, mask: Any, reduction: str) -> None:
        if key in self._found:  # another loss with the same weights
            return
        self._kept += [sample_weight, mask]  # their identities are keys
        total = sum_of_weights(sample_weight, mask, "float32", reduction)
        self._found[key] = keras.ops.maximum(keras.ops.stop_gradient(total), LEAST)
