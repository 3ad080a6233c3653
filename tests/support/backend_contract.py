"""Program that exercises the steps of the backend that Keras has loaded, and prints what it saw as JSON.

It packs its models to a folder, or trains on those that another backend has packed there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers

from nfdt.core.arrays.composite import SparseArray
from nfdt.core.errors import CaptureError
from nfdt.model.program.evaluation_check import check_predict
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from nfdt.model.program.unpack import unpack
from nfdt.model.training.metrics import ModelMetrics
from nfdt.model.training.steps import evaluation_step, gradient_step, make_step, prediction_step
from tests.support import loss_cases

SIZES = (8, 8, 8, 3)
EVEN = (8, 8, 8, 8)  # one shape to compile
COMPILED = ("sum, with a regularizer", "masked and weighted")  # losses whose steps are compiled, to save time


def batches(sizes=SIZES):
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(n, 4)).astype("f4"), draw.normal(size=(n, 1)).astype("f4")) for n in sizes]


def network(policy="float32", dropout=0.3):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            layers.Dense(6, "relu", kernel_regularizer="l2", dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.Dropout(dropout, dtype=policy),
            layers.Dense(1, dtype=policy),
        ],
    )


class Worker:
    """A worker's model for a user's model, and an optimizer as on a shard: with one flat variable."""

    def __init__(self, model, sample):
        packed = pack(model, sample)
        self.manifest = packed.manifest
        self.model = unpack(self.manifest, packed.artifacts.__getitem__, allow_code=True)
        self.weights = keras.Variable(load_state(packed.artifacts[self.manifest.state]).weights, name="flat")
        self.optimizer = keras.saving.deserialize_keras_object(self.manifest.optimizer)
        self.optimizer.build([self.weights])
        self.step = gradient_step(self.model, self.manifest.layout, loss_scale=self.manifest.loss_scale)

    def train(self, data):
        for batch in data:
            self.model.reset_metrics()  # as train_on_batch does
            result = self.step(np.asarray(self.weights), batch)
            assert result.finite
            gradient = keras.ops.convert_to_tensor(np.asarray(result.gradient))
            self.optimizer.apply([gradient], [self.weights])
        return {name: float(value) for name, value in result.logs.items()}


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def untrained(model):
    return [v.numpy().astype("f8").tolist() for v in model.non_trainable_variables]


def plain(model, data):
    """Train with Keras on the same batches."""
    for x, y in data:
        logs = model.train_on_batch(x, y, return_dict=True)
    return {name: float(value) for name, value in logs.items()}


def train_both(optimizer, sizes=EVEN, **mode):
    model, data = network(), batches(sizes)
    model.compile(optimizer, "mse", metrics=["mae"], **mode)
    there = Worker(model, data[0])
    begun = np.array(there.weights)
    keras.utils.set_random_seed(7)  # PyTorch's generator, from which its dropout draws
    logs = there.train(data)
    keras.utils.set_random_seed(7)
    expected = plain(model, data)
    return {
        "weights": float(np.max(np.abs(np.asarray(there.weights) - flat(model)))),
        "logs": [logs, expected],
        "untrained": [untrained(there.model), untrained(model)],
        "moved": float(np.linalg.norm(np.asarray(there.weights) - begun)),
        "traces": there.step.traces,
    }


def local_step_of(model):
    """Return the model and the step of a worker on which the optimizer steps, whether it is code, and its weights."""
    packed = pack(model, batches()[0], outer=(1.0, 0.0))
    made = unpack(packed.manifest, packed.artifacts.__getitem__, allow_code=False)
    weights = load_state(packed.artifacts[packed.manifest.state]).weights
    return made, make_step(made, packed.manifest), packed.manifest.is_code, weights


def local_steps(optimizer, **mode):
    """Train with the model's own optimizer on a worker, as Keras does alone."""
    model = network()
    model.compile(optimizer, "mse", metrics=["mae"], **mode)
    made, step, is_code, weights = local_step_of(model)
    step.load(weights)
    keras.utils.set_random_seed(7)
    for batch in batches(EVEN):
        made.reset_metrics()
        logs = step.train(step.prepare(batch), None)
    keras.utils.set_random_seed(7)
    expected = plain(model, batches(EVEN))
    return {
        "is_code": is_code,
        "weights": float(np.max(np.abs(step.read() - flat(model)))),
        "logs": [{name: float(value) for name, value in logs.items()}, expected],
        "untrained": [untrained(made), untrained(model)],
        "moved": float(np.linalg.norm(step.read() - weights)),
    }


def at_positions():
    """Return how far the same step moves the weights at several positions of a job, relative to the first."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model = network(dropout=0.0)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    _, step, _, weights = local_step_of(model)
    batch, moved = step.prepare(batches()[0]), []
    for position in (0, 2, 6):
        step.load(weights)
        step.train(batch, position)
        moved.append(float(np.linalg.norm(step.read() - weights)))
    return [length / moved[0] for length in moved]


def own_optimizers():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {
        "momentum": local_steps(keras.optimizers.SGD(0.1, momentum=0.9)),
        "schedule": local_steps(keras.optimizers.Adam(schedule)),
        "eager": local_steps(keras.optimizers.SGD(0.1), run_eagerly=True),
    }


def training():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {
        "momentum": train_both(keras.optimizers.SGD(0.1, momentum=0.9)),
        "adam": train_both(keras.optimizers.Adam(0.05), SIZES),
        "schedule": train_both(keras.optimizers.Adam(schedule)),
        "scaled": train_both(keras.optimizers.SGD(0.1, loss_scale_factor=64.0)),
        "eager": train_both(keras.optimizers.SGD(0.1), run_eagerly=True),
        "not compiled": train_both(keras.optimizers.SGD(0.1), jit_compile=False),
    }


def mixed_precision():
    found = {}
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        model = network(policy)
        optimizer = keras.optimizers.SGD(0.1)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        model.compile(optimizer, "mse")
        keras.config.set_dtype_policy("float32")
        there = Worker(model, batches()[0])
        result = there.step(np.asarray(there.weights), batches()[0])
        x, y = batches()[0]
        overflow = there.step(np.asarray(there.weights), (x * np.float32(1e30), y))
        after = there.step(np.asarray(there.weights), batches()[0])
        found[policy] = {
            "dtype": str(np.asarray(result.gradient).dtype),
            "finite": [result.finite, overflow.finite, after.finite],
            "norm": float(np.linalg.norm(np.asarray(result.gradient))),
        }
    return found


def evaluation():
    model = network()
    model.compile("sgd", "mse", metrics=["mae"])
    there = Worker(model, batches()[0])
    step, metrics = evaluation_step(there.model, there.manifest.layout), ModelMetrics(there.model)
    metrics.reset()
    for batch in batches():
        step(np.asarray(there.weights), batch)
        metrics.stepped(len(batch[0]))
    x, y = (np.concatenate(parts) for parts in zip(*batches(), strict=True))
    expected = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    return [metrics.logs(metrics.collect(), {}), {name: float(value) for name, value in expected.items()}]


def prediction():
    model = network()
    model.compile("sgd", "mse")
    there = Worker(model, batches()[0])
    x = batches()[0][0]
    (found,) = prediction_step(there.model, there.manifest.layout)(np.asarray(there.weights), (x,))
    tried = check_predict(model, (x,), 2**20)
    expected = model.predict(x, verbose=0)
    return [found.tolist(), keras.ops.convert_to_numpy(tried).tolist(), expected.tolist()]


def by_value():
    model = network()
    model.layers[2].rate = 0.0  # not in the constructor's arguments that get_config returns
    model.layers[0].extra = {"factor": 2}
    model.compile("sgd", "mse")
    packed = pack(model, batches()[0])
    made = unpack(packed.manifest, packed.artifacts.__getitem__, allow_code=True)
    return {"by_value": packed.manifest.by_value is not None, "extra": made.layers[0].extra["factor"]}


def prepared():
    """Return the numbers of samples of prepared batches, dense and sparse, and of stored elements."""
    model, (x, y) = network(), batches()[0]
    model.compile("sgd", "mse")
    there = Worker(model, (x, y))
    sparse = SparseArray(np.argwhere(x > 0), x[x > 0], x.shape)
    kinds = [x] if keras.backend.backend() == "torch" else [x, sparse]
    return {"samples": [there.step.prepare((kind, y)).samples for kind in kinds], "elements": int((x > 0).sum())}


def refusals():
    found = {}
    for name, kind in OWN_STEPS.items():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        model = kind(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        there = Worker(model, batches()[0])
        try:
            logs = there.train(batches()[:1])
            found[name] = float(logs["loss"])
        except CaptureError as error:
            found[name] = str(error)
    return found


def _own_steps():
    if keras.backend.backend() == "jax":
        from tests.support import own_steps_jax as own
    elif keras.backend.backend() == "torch":
        from tests.support import own_steps_torch as own
    else:
        from tests.support import own_steps_tensorflow as own
    return {"own": own.OwnStep, "none": own.NoUpdate, "twice": own.TwoUpdates}


def unions():
    """Return what the gradients of parts of a batch combine to, beside the gradient of the whole, for each loss."""
    found = {}
    for name, case in loss_cases.CASES.items():
        whole = tuple(part[:10] for part in loss_cases.data(**case) if part is not None)
        model = loss_cases.build(**case)
        model.compile(model.optimizer, model.loss, run_eagerly=name == "masked", jit_compile=name in COMPILED)
        there = Worker(model, whole)
        weights, metrics = np.asarray(there.weights), there.model.metrics[0]
        expected, loss = there.step(weights, whole), float(metrics.result())
        there.model.reset_metrics()
        rows = [slice(0, 6), slice(6, 10)]
        parts = [there.step(weights, tuple(a[own] for a in whole), share=(own.stop - own.start) / 10) for own in rows]
        gradients = [np.asarray(part.gradient) for part in parts]
        denominators = [None if part.denominator is None else float(part.denominator) for part in parts]
        known = [own.stop - own.start if d is None else d for own, d in zip(rows, denominators, strict=True)]
        factors = np.ones(2) if np.isinf(known).all() else np.divide(known, sum(known))
        union = sum(factor * gradient for factor, gradient in zip(factors, gradients, strict=True))
        found[name] = {
            "gradients": [union.tolist(), np.asarray(expected.gradient).tolist()],
            "denominators": [str(d) for d in denominators],
            "losses": [float(metrics.result()), loss],
        }
    return found


def exchange(folder):
    """Pack a model to the folder, or train on the one that another backend has packed there."""
    path = folder / "manifest.json"
    if not path.exists():
        model = network(dropout=0.0)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        packed = pack(model, batches()[0])
        for name, data in packed.artifacts.items():
            (folder / name).write_bytes(data)
        path.write_bytes(packed.manifest.to_bytes())
    manifest = Manifest.from_bytes(path.read_bytes())

    def read(name):
        return (folder / name).read_bytes()

    model, weights = unpack(manifest, read, allow_code=False), load_state(read(manifest.state)).weights
    step = gradient_step(model, manifest.layout, loss_scale=manifest.loss_scale)
    gradients = [np.asarray(step(weights, batch).gradient).tolist() for batch in batches()]
    return {"gradients": gradients, "untrained": untrained(model)}


OWN_STEPS = _own_steps()

if __name__ == "__main__":
    report = {
        "backend": keras.backend.backend(),
        "tensorflow": "tensorflow" in sys.modules,
        "training": training(),
        "own_optimizers": own_optimizers(),
        "at_positions": at_positions(),
        "mixed_precision": mixed_precision(),
        "evaluation": evaluation(),
        "prediction": prediction(),
        "by_value": by_value(),
        "prepared": prepared(),
        "refusals": refusals(),
        "unions": unions(),
        "exchange": exchange(Path(sys.argv[1])),
    }
    print(json.dumps(report))
