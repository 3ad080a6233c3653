"""Recurrent layers whose state crosses from batch to batch: trained on one worker, as in plain Keras."""

from __future__ import annotations

import pytest

from tests.support.scripts import answer

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras, nfdt, numpy as np
import tensorflow as tf

random = np.random.default_rng(0)
x, y = random.normal(size=(96, 5, 2)).astype("float32"), random.normal(size=(96, 1)).astype("float32")

def make():
    keras.utils.set_random_seed(5)
    both = keras.layers.Bidirectional(keras.layers.GRU(3, stateful=True, return_sequences=True))
    layers = [keras.Input(batch_shape=(16, 5, 2)), both, keras.layers.LSTM(4, stateful=True), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model

def fit(model, data):
    return model.fit(*data, epochs=3, shuffle=False, verbose=0, **({"batch_size": 16} if len(data) == 2 else {}))

def dataset():
    return (tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True),)

out = {}
for name, data in {"arrays": lambda: (x, y), "dataset": dataset}.items():
    plain, cluster = make(), make()
    expected = fit(plain, data()).history["loss"]
    with nfdt.session(workers=2):
        history = fit(cluster, data())
        out[name] = [float(np.abs(np.subtract(history.history["loss"], expected)).max()), len(history.nfdt)]
    out[name].append(float(np.abs(plain.predict(x[:16], verbose=0) - cluster.predict(x[:16], verbose=0)).max()))
    out[name].append(float(np.abs(plain.layers[1].states[0].numpy()).sum()) > 0)
print(json.dumps(out))
"""


@pytest.mark.feature("Recurrent layers with `stateful=True`", area="Models", note="on one worker, with a warning")
def test_stateful_layers_train_on_one_worker_as_in_plain_keras_and_their_state_comes_back(run_script):
    done = run_script(SCRIPT)
    out = answer(done)
    for name in ("arrays", "dataset"):
        loss, workers, prediction, carried = out[name]
        assert (loss, prediction) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5)), name
        assert (workers, carried) == (1, True)
    assert "This fit trains on one worker, not on 2, because with stateful=True (layers: " in done.stderr
