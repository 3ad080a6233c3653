"""Scripts with Keras on JAX and PyTorch, and jobs whose workers are on several backends."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.scripts import NFDT, OTHER_BACKENDS, answer, start_server, start_workers, stop

pytestmark = pytest.mark.processes


TRAINING = """
import os
os.environ["KERAS_BACKEND"] = "{backend}"
import json
import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype("float32")
model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.Dense(10, activation="softmax"),
])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x[:960], y[:960], batch_size=32, epochs=2, shuffle=False, verbose=0,
                    validation_data=(x[1000:1200], y[1000:1200]))
print(json.dumps(dict(
    backend=keras.backend.backend(),
    history=history.history,
    weights=[w.tolist() for w in model.get_weights()],
    where=getattr(getattr(history, "nfdt", None), "where", None),
)))
"""

MIXED = """
import json
import keras, nfdt
import numpy as np
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype("float32")

def train(batch_size):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    model.fit(x[:960], y[:960], batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return [w.tolist() for w in model.get_weights()]

plain = train(64)  # a round is a batch of each worker
with nfdt.session(workers=2, algorithm="bsp"):
    print(json.dumps(dict(plain=plain, mixed=train(32))))
"""


def worst(one, other) -> float:
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(one, other, strict=True))


@pytest.mark.feature("Keras on JAX", area="Launchers and environments")
@pytest.mark.parametrize("backend", OTHER_BACKENDS)
def test_a_script_on_another_backend_trains_as_on_one_machine(run_script, backend):
    source = TRAINING.format(backend=backend)
    plain = answer(run_script(source, command=(NFDT[0],)))
    trained = answer(run_script(source, command=(*NFDT, "run", "--workers", "1", "--algorithm", "bsp")))
    assert trained["backend"] == plain["backend"] == backend
    assert (plain["where"], trained["where"]) == (None, "cluster")
    assert worst(trained["weights"], plain["weights"]) < 1e-5
    for name, values in plain["history"].items():
        assert trained["history"][name] == pytest.approx(values, abs=1e-4)


@pytest.mark.feature("Workers of one job on TensorFlow and JAX", area="Launchers and environments")
def test_workers_of_one_job_are_on_several_backends_and_the_result_is_that_of_one(run_script, tmp_path):
    cluster = start_server(tmp_path)
    workers = [start_workers(cluster, 1, "--name", name, "--backend", name) for name in ("jax", "tensorflow")]
    try:
        found = answer(run_script(MIXED, **cluster.env()))
    finally:
        stop(*workers, cluster.process)
    (began,) = re.findall("starts with (.*)", (tmp_path / "server.log").read_text())
    assert "jax-worker" in began
    assert "tensorflow-worker" in began
    assert worst(found["mixed"], found["plain"]) < 1e-5
