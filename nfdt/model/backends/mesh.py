"""The devices of a worker: how many it takes, and the mesh over them of a script's ModelParallel. No Keras here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nfdt.core.errors import UsageError

Axes = tuple[str | None, ...]
"""Axis of the mesh for each dimension of an array; None: the dimension is not divided."""


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices and the layouts of variables and tensors on it: Keras' ModelParallel as data.

    Attributes:
        shape: Number of devices by axis.
        axes: Names of the axes.
        batch_axis: Axis along which the rows of a batch are divided.
        layouts: Regular expression of paths, and the axes of variables and tensors with such a path.
        variables: Path and axes of each variable of the script's model.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    batch_axis: str
    layouts: tuple[tuple[str, Axes], ...]
    variables: tuple[tuple[str, Axes], ...] = ()

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Mesh:
        """Inverse of :meth:`to_json`."""
        layouts, variables = (tuple((str(k), tuple(axes)) for k, axes in entry[n]) for n in ("layouts", "variables"))
        return cls(tuple(map(int, entry["shape"])), tuple(entry["axes"]), str(entry["batch_axis"]), layouts, variables)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return vars(self).copy()


def choose_devices(
    available: Sequence[str],
    wanted: int | Literal["all"] | None,
    mesh: Mesh | None,
    *,
    emulated: int | None = None,
    owner: str = "the worker",
) -> tuple[str, ...]:
    """Return the devices on which a worker computes.

    Args:
        available: Devices of its process, as in ``gpu:0``.
        wanted: The option ``devices_per_worker``; None: all accelerators, or one processor.
        mesh: Mesh of the program, if it has one.
        emulated: Number of devices that the processor is to be; None: it is not emulated.
        owner: The worker, for error messages.

    Raises:
        UsageError: the process has fewer than wanted, or than the mesh has places.
    """
    if emulated and emulated > len(available):
        raise _lacking(f"emulate.devices={emulated}", available, owner)
    offered = available[:emulated] if emulated else available
    single = wanted is None and not emulated and all(name.lower().startswith("cpu") for name in offered)
    count = mesh.size if mesh is not None else wanted if isinstance(wanted, int) else 1 if single else len(offered)
    if count <= len(offered):
        return tuple(offered[:count])
    what = f"the mesh of the script's ModelParallel has {count}" if mesh is not None else f"devices_per_worker={count}"
    raise _lacking(what, offered, owner)


def _lacking(what: str, offered: Sequence[str], owner: str) -> UsageError:
    return UsageError(
        f"{what}: expected as many devices in the process of {owner}. Received: {len(offered)} ({', '.join(offered)}). "
        "Start its slot with more GPUs (fewer slots on the machine), ask for fewer devices, or set emulate.devices to "
        "try it on a processor; a process that has computed already keeps the devices that it has."
    )
