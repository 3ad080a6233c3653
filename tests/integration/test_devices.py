"""Workers of several devices in real processes, whose processors are divided: trained as on one device."""

from __future__ import annotations

import pytest

from tests.support.scripts import NFDT, answer

pytestmark = pytest.mark.processes

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

TRAINING = """
import json
import keras
import nfdt
import numpy as np

random = np.random.default_rng(0)
x, y = random.normal(size=(493, 20)).astype("float32"), random.integers(0, 8, 493)

def build(norm=False):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32, "relu"), *([keras.layers.BatchNormalization()] if norm else [])]
    model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(8, "softmax")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def train(model, batch_size=32):
    history = model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, validation_data=(x[:90], y[:90]))
    return dict(weights=model.get_weights(), logs=history.history)

def difference(one, other):
    weights = max(float(np.abs(a - b).max()) for a, b in zip(one["weights"], other["weights"], strict=True))
    logs = max(abs(value - other["logs"][name][0]) for name, (value,) in one["logs"].items())
    return max(weights, logs)

found = {}
"""

ON_JAX = """
import os
os.environ["KERAS_BACKEND"] = "jax"
TRAINING

from keras import distribution

mesh = distribution.DeviceMesh((2, 2), ["rows", "parts"], distribution.list_devices())
layouts = distribution.LayoutMap(mesh)
layouts[".*dense.*kernel"] = (None, "parts")
layouts[".*dense.*bias"] = ("parts",)
kinds = dict(
    data=distribution.DataParallel(),
    model=distribution.ModelParallel(layout_map=layouts, batch_dim_name="rows"),
)

def equal(kind):
    plain = train(build(norm=True))
    with nfdt.LocalCluster(workers=1) as cluster:
        for algorithm in ("bsp", "ddc-asgd"):
            with kinds[kind].scope(), cluster.session(algorithm=algorithm):
                found[algorithm] = difference(train(build(norm=True)), plain)

def refused():
    with nfdt.LocalCluster(workers=1) as cluster:
        for kind, count in (("model", 2), ("data", 8)):
            try:
                with kinds[kind].scope(), cluster.session(devices_per_worker=count):
                    train(build())
            except nfdt.errors.UsageError as error:
                found[kind] = str(error)

CALL
print(json.dumps(found))
""".replace("TRAINING", TRAINING)

MIXED = """
import os
os.environ["KERAS_BACKEND"] = "jax"
TRAINING

plain = train(build(), batch_size=64)  # a round is a batch of each worker
with nfdt.session(workers=2, algorithm="bsp", emulate={"devices": [4, 1]}):
    found["mixed"] = difference(train(build()), plain)
print(json.dumps(found))
""".replace("TRAINING", TRAINING)

ON_TENSORFLOW = """
TRAINING
import tensorflow as tf

parts = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
plain = train(build())
with nfdt.LocalCluster(workers=1, emulate={"devices": 4}) as cluster:
    for algorithm in ("bsp", "ddc-asgd"):
        with cluster.session(algorithm=algorithm):
            found[algorithm] = difference(train(build()), plain)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        mirrored = build()
    with cluster.session(algorithm="bsp"):
        found["mirrored"] = difference(train(mirrored), plain)
print(json.dumps(found))
""".replace("TRAINING", TRAINING)

FLOAT = 2e-5
PYTHON = (NFDT[0],)


@pytest.mark.feature("`keras.distribution` of a script on JAX", area="Launchers and environments")
@pytest.mark.parametrize(("kind", "devices"), [pytest.param("data", "all its", marks=pytest.mark.long), ("model", "4")])
def test_a_worker_of_four_devices_equals_one_device_on_jax(run_script, kind, devices):
    done = run_script(ON_JAX.replace("CALL", f"equal('{kind}')"), command=PYTHON, **FOUR)
    found = answer(done)
    assert found.keys() == {"bsp", "ddc-asgd"}
    assert max(found.values()) < FLOAT
    assert f"on 1 worker, each with {devices} devices" in done.stderr


def test_workers_with_other_numbers_of_devices_than_asked_for_are_refused(run_script):
    found = answer(run_script(ON_JAX.replace("CALL", "refused()"), command=PYTHON, **FOUR))
    assert "expected 4, the devices in the mesh of the script's ModelParallel. Received: 2" in found["model"]
    assert "devices_per_worker=8: expected as many devices" in found["data"]
    assert "Received: 4 (cpu:0, cpu:1, cpu:2, cpu:3)" in found["data"]


@pytest.mark.long
@pytest.mark.feature("Workers of one job with different numbers of devices", area="Launchers and environments")
def test_a_worker_of_four_devices_trains_beside_one_of_one(run_script):
    assert answer(run_script(MIXED, command=PYTHON))["mixed"] < FLOAT


@pytest.mark.feature("`MirroredStrategy` of a script", area="Launchers and environments")
def test_a_worker_of_several_devices_equals_one_device_on_tensorflow(run_script):
    found = answer(run_script(ON_TENSORFLOW))
    assert found.keys() == {"bsp", "ddc-asgd", "mirrored"}
    assert max(found.values()) < FLOAT
