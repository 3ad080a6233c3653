"""Distributed optimizer for models with layers that each rank trains for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfdt.keras.optimizer import DistributedOptimizer, distributed_apply


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
        optimizer: See :func:`DistributedOptimizer`.
        name: See there.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        gradient_predivide_factor: See there.
        op: See there.
        groups: See there.
        process_set: See there.
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
    apply.local.add_layers(local_layers)
    return optimizer
