"""Steps on four devices and on one, with the backend of the environment: prints how far they differ, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.contract import current
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.program.pack import layout_of, pack
from nfdt.model.program.unpack import unpack
from nfdt.model.training import steps

DEVICES = 4
BATCHES = (32, 13, 3)
WIDTH = 64


def dense(loss: Any = "sparse_categorical_crossentropy", *, norm: bool = False, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(WIDTH, "relu", kernel_regularizer=keras.regularizers.L2(0.1), name="wide"),
        *([keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)] if norm else []),
        keras.layers.Dense(8, "softmax", name="narrow"),
    ]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **compiled)
    keras_build(model)
    return model


def keras_build(model: Any) -> None:
    x, y = batch(4, np.random.default_rng(0))
    model.test_on_batch(x, y)
    model.reset_metrics()


def batch(rows: int, random: Any) -> tuple[Any, Any]:
    return random.normal(size=(rows, 20)).astype("float32"), random.integers(0, 8, rows)


def outcomes(step: Any, layout: ParameterLayout) -> list[dict[str, Any]]:
    """Return gradient, logs and denominator of a step for batches of several sizes, and then the untrained state."""
    random, found = np.random.default_rng(1), []
    for rows in BATCHES:
        weights = (random.normal(size=layout.size) * 0.1).astype("float32")
        result = step(weights, batch(rows, random), share=0.5)
        logs = {name: float(value) for name, value in result.logs.items()}
        state = [np.asarray(variable.numpy()) for variable in step.model.non_trainable_variables]
        found.append(
            {"gradient": result.vector, "logs": logs, "sum": result.denominator == float("inf"), "state": state}
        )
    return found


def difference(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest differences: of gradients relative to their largest element, of logs, of untrained state."""
    pairs = list(zip(mine, theirs, strict=True))
    return {
        "gradient": max(worst([a["gradient"]], [b["gradient"]]) / float(np.abs(b["gradient"]).max()) for a, b in pairs),
        "logs": max(abs(a["logs"][name] / value - 1) for a, b in pairs for name, value in b["logs"].items()),
        "untrained": max(worst(a["state"], b["state"]) for a, b in pairs),
        "same kind": all(a["sum"] == b["sum"] for a, b in pairs),
    }


def worst(mine: Sequence[Any], theirs: Sequence[Any]) -> float:
    return max((float(np.abs(a - b).max()) for a, b in zip(mine, theirs, strict=True)), default=0.0)


CASES = {
    "mean": {},
    "sum": {"loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum")},
    "normalized": {"norm": True},
}


def divided(backend: Any, devices: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    single = dense(**options)
    layout = layout_of(single)
    expected = outcomes(steps.gradient_step(single, layout), layout)
    with backend.distributed(devices, None):
        model, copies = dense(**options), []
        for device in devices[1:] if backend.copies_models else ():
            with backend.on(device):
                copies.append(dense(**options))
        return difference(outcomes(steps.gradient_step(model, layout, copies=copies), layout), expected)


def sharded(backend: Any, devices: tuple[str, ...]) -> dict[str, Any]:
    """Train on a mesh that a script has described."""
    kinds = keras.distribution
    mesh = kinds.DeviceMesh((2, 2), ["rows", "parts"], list(devices))
    layouts = kinds.LayoutMap(mesh)
    # A model that is built from its configuration has this path only in the end.
    layouts["sequential.*/wide/kernel"] = (None, "parts")
    layouts[".*narrow.kernel"] = ("parts", None)
    with kinds.ModelParallel(layout_map=layouts, batch_dim_name="rows").scope():
        script = dense(norm=True)
        packed = pack(script, batch(4, np.random.default_rng(0)))
    manifest, read = packed.manifest, packed.artifacts.__getitem__
    plain, data = dense(norm=True), batch(32, np.random.default_rng(2))
    weights = np.concatenate([variable.numpy().reshape(-1) for variable in plain.trainable_variables])
    expected = outcomes(steps.gradient_step(dense(norm=True), manifest.layout), manifest.layout)
    plain.train_on_batch(*data)
    with backend.distributed(devices, manifest.mesh):
        model = unpack(manifest, read, allow_code=False)
        found: dict[str, Any] = {"unpacked": worst(model.get_weights(), script.get_weights())}
        found["bytes"] = {variable.path.rpartition("/wide/")[2]: bytes_of(variable) for variable in model.weights[:2]}
        found["step"] = difference(outcomes(steps.gradient_step(model, manifest.layout), manifest.layout), expected)
        local = unpack(manifest, read, allow_code=False)
        local.optimizer.build(local.trainable_variables)
        step = backend.local_step(local, manifest.layout, JobProgress([local.optimizer]))
        step.load(weights)
        step.train(step.prepare(data), None)
        found["local"] = worst(local.get_weights(), plain.get_weights())
        found["local bytes"] = bytes_of(local.weights[0])
    return found


def bytes_of(variable: Any) -> list[int]:
    """Return the bytes of a variable, and then those of its part on each device."""
    return [variable.value.nbytes, *(part.data.nbytes for part in variable.value.addressable_shards)]


def main() -> None:
    backend = current()
    backend.emulate_devices(DEVICES)
    devices = tuple(backend.devices())
    report: dict[str, Any] = {"devices": devices}
    report["divided"] = {name: divided(backend, devices, options) for name, options in CASES.items()}
    if backend.has_meshes:
        report["sharded"] = sharded(backend, devices)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
