"""The devices of a process on JAX: Keras' own distributions over them, and the places of weights and batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np

from nfdt.core.arrays.composite import SparseArray
from nfdt.model.backends.contract import as_tensors, to_tensor
from nfdt.model.backends.mesh import Mesh
from nfdt.model.backends.variables import on_devices_of
from nfdt.model.keras_internals.models import layout_of, set_layout


@contextmanager
def distributed(devices: Sequence[str], mesh: Mesh | None) -> Iterator[None]:
    """Make variables in the block on several devices; see ``KerasBackend.distributed``."""
    distribution: Any = None
    if mesh is not None:
        distribution = ShippedLayouts(mesh, devices)
    elif len(devices) > 1:
        distribution = keras.distribution.DataParallel(devices=list(devices))
    held = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(held)


class ShippedLayouts(keras.distribution.ModelParallel):
    """The ModelParallel of a script, on devices of this process.

    Args:
        mesh: The script's mesh and layouts.
        devices: As many as the mesh has places.
    """

    def __init__(self, mesh: Mesh, devices: Sequence[str]) -> None:
        device_mesh = keras.distribution.DeviceMesh(mesh.shape, list(mesh.axes), list(devices))
        layouts = keras.distribution.LayoutMap(device_mesh)
        for pattern, axes in mesh.layouts:
            layouts[pattern] = tuple(axes)
        super().__init__(layout_map=layouts, batch_dim_name=mesh.batch_axis)
        self._mesh = mesh

    def get_variable_layout(self, variable: Any) -> Any:
        """Return the layout of the script's variable.

        A model that is built from its configuration has other paths than the script's until it is complete: they begin
        with other names.
        """
        found = {
            tuple(axes)
            for path, axes in self._mesh.variables
            if len(axes) == len(variable.shape) and _ends_alike(path, variable.path)
        }
        if len(found) == 1:
            return keras.distribution.TensorLayout(found.pop(), self.device_mesh)
        return super().get_variable_layout(variable)

    def settle(self, variables: Sequence[Any]) -> None:
        """Give the variables of a built model, in their order, the layouts of the script's."""
        for variable, (_, axes) in zip(variables, self._mesh.variables, strict=True):
            if layout_of(variable).axes != tuple(axes):
                set_layout(variable, keras.distribution.TensorLayout(axes, self.device_mesh))
                variable.assign(variable.value)


def _ends_alike(one: str, other: str) -> bool:
    long, short = sorted((one, other), key=len, reverse=True)
    return re.search(rf"(^|/){re.escape(short)}$", long) is not None


class Placement:
    """Places of weights and batches under the distribution that Keras has now.

    Attributes:
        is_distributed: Whether there are several devices.
    """

    def __init__(self) -> None:
        self._distribution = keras.distribution.distribution()
        self.is_distributed = self._distribution is not None

    def batch(self, batch: Any) -> Any:
        """Return a batch as tensors: its rows divided among the devices, or all on each device if they do not divide.

        Both give the numbers of one device: XLA computes with whole batches, wherever their rows are.
        """
        if not self.is_distributed:
            return as_tensors(batch)
        return keras.tree.map_structure(lambda leaf: None if leaf is None else self._placed(leaf), batch)

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, SparseArray):
            return jax.device_put(to_tensor(leaf), self._everywhere(0))
        array = np.asarray(leaf)
        if array.dtype.kind in "OSU":
            return to_tensor(leaf)  # which refuses it
        replicas = self._distribution.num_model_replicas
        divides = array.ndim > 0 and array.shape[0] % replicas == 0
        layout = self._distribution.get_data_layout(array.shape).backend_layout if divides else self._everywhere(0)
        return jax.device_put(array, layout, may_alias=False)

    def _everywhere(self, rank: int) -> Any:
        return keras.distribution.TensorLayout([None] * rank, self._distribution.device_mesh).backend_layout

    def weights(self, parts: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the values of variables, arrays on the host, on the devices; each gets its own part only."""
        return [on_devices_of(variable, part) for part, variable in zip(parts, variables, strict=True)]

    def constrained(self, parts: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of variables, within a traced step, divided as the variables are."""
        if not self.is_distributed:
            return list(parts)
        pairs = zip(parts, variables, strict=True)
        return [jax.lax.with_sharding_constraint(part, layout_of(variable).backend_layout) for part, variable in pairs]
