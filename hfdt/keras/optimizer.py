"""Optimizers that reduce the gradients of all ranks before they apply them: of all variables, or of some."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hfdt.keras.compression import find_compressor
from hfdt.keras.horovod_api import horovod
from hfdt.keras.partial_reduction import PartialReduction
from hfdt.keras.reduction import Accumulation, Reduction, check_reduction
from nfdt.core.errors import UsageError
from nfdt.model.keras_internals.training import optimized_variables

logger = logging.getLogger(__name__)


class DistributedApply:
    """Replacement of ``apply`` for one optimizer, set as an attribute of that object alone.

    Args:
        optimizer: The user's optimizer.
        reduction: Reduction of the gradients.
        accumulation: Accumulation of several passes before the reduction, or None.

    Attributes:
        reduction: See the argument.
    """

    def __init__(self, optimizer: Any, reduction: PartialReduction, accumulation: Accumulation | None) -> None:
        self._optimizer, self.reduction, self._accumulation = optimizer, reduction, accumulation

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients, then apply them: ``apply`` of the optimizer's class.

        Raises:
            UsageError: a LossScaleOptimizer around this optimizer would apply on only some of the ranks.
        """
        _refuse_a_loss_scaler_outside(self._optimizer)
        gradients = list(grads)
        if not gradients:
            return
        variables = self._variables(trainable_variables)
        if self._accumulation is None:
            self._update(gradients, variables)
            return

        def update(sums: Sequence[Any]) -> None:
            self._update(sums, variables)

        def skip() -> None:
            self._optimizer.iterations.assign_add(1)

        self._accumulation(gradients, variables, update, skip)

    def move_to(self, optimizer: Any) -> None:
        """Reduce before another optimizer's ``apply`` instead of this one's."""
        del self._optimizer.apply, self._optimizer.register_local_var
        self._optimizer = optimizer
        _attach(optimizer, self)

    def _variables(self, variables: Any) -> list[Any]:
        if variables is None:
            # Private: Keras keeps here the variables that the optimizer was built with, which apply(grads) refers to.
            return optimized_variables(self._optimizer)
        variables = list(variables)
        if not self._optimizer.built:  # now, not inside the tf.cond of an accumulation
            with keras.name_scope(self._optimizer.name):
                self._optimizer.build(variables)
        return variables

    def _update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        reduced = self.reduction(gradients, variables, self._optimizer)
        type(self._optimizer).apply(self._optimizer, reduced, variables)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make ``optimizer`` reduce the gradients of all ranks before it applies them.

    The same object is returned: its class, state, configuration and file format stay, so a saved model loads without
    Horovod. Clipping, weight decay and loss scaling act on the reduced gradients.

    Args:
        optimizer: Any Keras optimizer, or the name of one.
        name: Prefix of the operations' names, equal on all ranks. Default: ``Distributed`` and the optimizer's class.
        device_dense: Device that reduces dense gradients; empty: TensorFlow chooses.
        device_sparse: Device that reduces sparse gradients.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, their names, or a user-defined class with ``compress``
            and ``decompress``. Sparse gradients are sent uncompressed.
        sparse_as_dense: Convert gradients of embeddings to dense ones before the reduction.
        gradient_predivide_factor: With ``Average``: divide by this before the sum, by ``size / factor`` after it.
        op: ``Average`` (default), ``Sum`` or ``Adasum`` (on the gradients; MPI; 2, 4, 8, ... ranks).
        backward_passes_per_step: Number of steps whose gradients are added before they are reduced and applied;
            ``iterations`` counts every step. Sparse gradients become dense.
        average_aggregated_gradients: Divide that sum by ``backward_passes_per_step``.
        num_groups: Older name of ``groups``.
        groups: Default: one operation for all gradients of a dtype. A number: that many operations, which overlap with
            the backward pass. Lists of variables: one operation per list, and one per other variable.
        process_set: Ranks that participate. Default: all.
        scale_local_gradients: Divide gradients of variables given to ``register_local_var`` by the number of ranks.

    Returns:
        ``optimizer``, with an additional method ``register_local_var(variable)``.

    Raises:
        NotInstalled: Horovod is not installed.
        UsageError: the optimizer is already distributed, or options exclude each other.
    """
    hvd = horovod()
    optimizer = keras.optimizers.get(optimizer)
    _check_optimizer(optimizer, backward_passes_per_step)
    reduction = Reduction(
        name=name or f"Distributed.{type(optimizer).__name__}",  # its own name has a number, which ranks count alone
        op=hvd.Average if op is None else op,
        process_set=hvd.global_process_set if process_set is None else process_set,
        compression=find_compressor(compression),
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    check_reduction(reduction)
    accumulation = None
    if backward_passes_per_step > 1:
        accumulation = Accumulation(backward_passes_per_step, average=average_aggregated_gradients)
    partial = PartialReduction(reduction, scale=scale_local_gradients)
    _attach(optimizer, DistributedApply(optimizer, partial, accumulation))
    return optimizer


def distributed_apply(optimizer: Any) -> DistributedApply | None:
    """Return the reduction that :func:`DistributedOptimizer` set as this optimizer's ``apply``, or None."""
    found = vars(optimizer).get("apply") if optimizer is not None else None
    return found if isinstance(found, DistributedApply) else None


def prepare_model(model: Any) -> None:
    """Prepare a compiled model for its distributed optimizer; the callbacks do it when Keras sets their model.

    If ``compile`` has put a LossScaleOptimizer around the optimizer, gradients are reduced before that one: all ranks
    see the same overflow and skip the same steps. XLA, which cannot compile Horovod's operations, is switched off.
    """
    optimizer = getattr(model, "optimizer", None)
    inside = distributed_apply(getattr(optimizer, "inner_optimizer", None))
    if inside is not None:
        inside.move_to(optimizer)
    if distributed_apply(optimizer) is not None and model.jit_compile:
        logger.info("jit_compile is switched off: XLA cannot compile Horovod's operations")
        model.jit_compile = False
        model.train_function = None


def _attach(optimizer: Any, apply: DistributedApply) -> None:
    optimizer.apply = apply
    optimizer.register_local_var = apply.reduction.local.add_variables


def _check_optimizer(optimizer: Any, passes: int) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if distributed_apply(optimizer) or distributed_apply(inner):
        raise UsageError(
            f"{optimizer.name!r} reduces its gradients already. Call DistributedOptimizer once; "
            "hfdt.keras.load_model() has done it for the model it returns."
        )
    if passes < 1:
        raise UsageError(f"Expected backward_passes_per_step to be at least 1. Received: {passes}.")
    if passes > 1 and inner.gradient_accumulation_steps:
        raise UsageError("Both backward_passes_per_step and the optimizer's gradient_accumulation_steps: choose one.")


def _refuse_a_loss_scaler_outside(optimizer: Any) -> None:
    """Raise if called by a LossScaleOptimizer: it checks only this rank's gradients, and other ranks would wait."""
    frame = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller is not optimizer:
            raise UsageError(
                f"A LossScaleOptimizer around the distributed {optimizer.name!r} skips a step on the ranks whose "
                "gradient overflows, and the others would wait for them. Expected the other order: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or a callback of "
                "hfdt.keras.callbacks in fit(), which puts it right."
            )
        frame = frame.f_back  # type: ignore[assignment]


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make ``optimizer`` reduce the gradients of all ranks, except those of local layers, before it applies them.

    Give ``BroadcastGlobalVariablesCallback`` the variables of these layers as ``local_variables``, or all ranks start
    with those of one rank.

    Args:
        optimizer: As for :func:`DistributedOptimizer`, like the arguments up to ``process_set``.
        name: As there.
        device_dense: As there.
        device_sparse: As there.
        compression: As there.
        sparse_as_dense: As there.
        gradient_predivide_factor: As there.
        op: As there.
        groups: As there.
        process_set: As there.
        local_layers: One or several layers, built or not. None: the same as :func:`DistributedOptimizer`.
        scale_local_gradients: Divide gradients of these layers by the number of ranks.

    Returns:
        ``optimizer``, with an additional method ``register_local_var(variable)``.

    Raises:
        NotInstalled: Horovod is not installed.
        UsageError: a member of ``local_layers`` is no layer, or as for :func:`DistributedOptimizer`.
    """
    optimizer = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    apply = distributed_apply(optimizer)
    assert apply is not None
    apply.reduction.local.add_layers(local_layers)
    return optimizer
