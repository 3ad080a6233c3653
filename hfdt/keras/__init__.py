"""Drop-in for ``horovod.tensorflow.keras`` on Keras 3: ``import hfdt.keras as hvd``.

Horovod is imported when one of its functions is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hfdt.keras import callbacks
from hfdt.keras.collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hfdt.keras.compression import Compression
from hfdt.keras.horovod_api import horovod, init
from hfdt.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from nfdt.core.errors import UsageError

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "init",
    "load_model",
    "reducescatter",
]

# Names of Horovod that are re-exported unchanged.
_HANDED_ON = frozenset(
    """
    is_initialized shutdown rank size local_rank local_size cross_rank cross_size
    Adasum Average Max Min Product Sum ProcessSet add_process_set global_process_set remove_process_set
    allgather_object broadcast_object ccl_built cuda_built ddl_built gloo_built gloo_enabled is_homogeneous join
    mpi_built mpi_enabled mpi_threads_supported nccl_built rocm_built start_timeline stop_timeline
    """.split()
)


def __getattr__(name: str) -> Any:
    if name == "elastic":
        horovod()
        return importlib.import_module("hfdt.keras.elastic")
    if name in _HANDED_ON:
        return getattr(horovod(), name)
    raise AttributeError(f"module 'hfdt.keras' has no attribute {name!r}. Expected one of: {', '.join(__dir__())}.")


def __dir__() -> list[str]:
    return sorted({*__all__, *_HANDED_ON, "elastic"})


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a ``.keras`` file and make its optimizer, with its saved state, reduce gradients over all ranks.

    Args:
        filepath: As for ``keras.saving.load_model``.
        custom_optimizers: User-defined optimizer classes that the file names.
        custom_objects: Other user-defined objects, by name.
        compression: As for :func:`DistributedOptimizer`.
        legacy_opts: Keras 2 optimizers; not supported.
        options: Further arguments of :func:`DistributedOptimizer`, such as ``op`` or ``backward_passes_per_step``.

    Returns:
        The compiled model.

    Raises:
        UsageError: the file contains no optimizer, or ``legacy_opts`` is set.
    """
    if legacy_opts:
        raise UsageError("Keras 3 has no legacy optimizers: leave legacy_opts out.")
    named = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise UsageError(
            f"{str(filepath)!r} holds a model without an optimizer. Load it with keras.saving.load_model() and compile "
            "it with a DistributedOptimizer."
        )
    DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
