"""The distribution that a script has set over the devices of its machine, for the devices of workers."""

from __future__ import annotations

from typing import Any, Literal

import keras

from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import current
from nfdt.model.backends.mesh import Axes, Mesh
from nfdt.model.keras_internals.models import distribution_strategy, layout_of, layouts_of


def describe_mesh(model: Any) -> dict[str, Any] | None:
    """Return the script's ModelParallel with the layouts of a built model's variables, as JSON; None without one.

    Raises:
        CaptureError: the script has set a distribution of another kind.
    """
    distribution = keras.distribution.distribution()
    if distribution is None or isinstance(distribution, keras.distribution.DataParallel):
        return None
    if not isinstance(distribution, keras.distribution.ModelParallel) or not current().has_meshes:
        raise CaptureError(
            "keras.distribution: expected DataParallel, or on JAX ModelParallel. Received: "
            f"{type(distribution).__name__} on {current().name}. Set one of these, or none: devices_per_worker divides "
            "each worker's batches among its devices."
        )
    device_mesh = distribution.device_mesh
    layouts = tuple((pattern, _axes(layout)) for pattern, layout in layouts_of(distribution))
    variables = tuple((v.path, _axes(layout_of(v)) or (None,) * len(v.shape)) for v in model.variables)
    shape, axes = tuple(map(int, device_mesh.shape)), tuple(device_mesh.axis_names)
    return Mesh(shape, axes, str(distribution.batch_dim_name), layouts, variables).to_json()


def _axes(layout: Any) -> Axes:
    return tuple(getattr(layout, "axes", ()))


def devices_asked(model: Any) -> int | Literal["all"] | None:
    """Return how many devices the script divides each batch among; None if it says nothing.

    All of its own stand for all of a worker's, whose number may be another one.
    """
    distribution, strategy = keras.distribution.distribution(), distribution_strategy(model)
    if strategy is not None:
        count = int(strategy.num_replicas_in_sync)
    elif isinstance(distribution, keras.distribution.DataParallel):
        count = int(distribution.num_model_replicas)
    else:
        return None
    return "all" if count == len(current().devices()) else count
