"""``evaluate`` and ``predict`` of a script with real processes, one of which is killed."""

from __future__ import annotations

import pytest

from tests.support.scripts import answer

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os, signal, tempfile
import keras
import numpy as np
import tensorflow as tf
import nfdt

SCRIPT, MARK = os.getpid(), os.path.join(tempfile.mkdtemp(), "mark")

def kill_once():
    if os.getpid() != SCRIPT and os.path.exists(MARK):
        try:
            os.rmdir(MARK)  # one process can
        except FileNotFoundError:
            return np.float32(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float32(0)

class Fragile(keras.layers.Layer):
    def call(self, x):
        return x + tf.ensure_shape(tf.py_function(kill_once, [], tf.float32), [])

class Hooks(keras.callbacks.Callback):
    seen = []
    def on_test_begin(self, logs=None):
        self.seen.append("begin")
    def on_test_end(self, logs=None):
        self.seen.append(logs)
        assert self.model.get_metrics_result().keys() == logs.keys()

keras.utils.set_random_seed(2)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(1003, 6)), rng.integers(0, 3, size=1003)
inputs = keras.Input((6,))
hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(keras.layers.Dense(8, "tanh")(inputs)))
output = keras.layers.Dense(3, "softmax", name="class")(hidden)
model = keras.Model(inputs, output)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
both = keras.Model(inputs, {"class": output, "hidden": [hidden]})
both.compile("sgd", {"class": None, "hidden": [None]})
fragile = keras.Sequential([keras.Input((6,)), Fragile(), model])
fragile.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)

def results():
    return dict(
        logs=model.evaluate(
            x, y, sample_weight=np.linspace(0, 1, 1003), callbacks=[Hooks()], return_dict=True, verbose=0
        ),
        values=model.evaluate(x, y, batch_size=100, steps=4, verbose=2),
        fragile=fragile.evaluate(x, y, batch_size=4, verbose=0),
        outputs=model.predict(x, verbose=0),
        after=[float(value) for value in model.get_metrics_result().values()],
        predicted=both.predict(x, batch_size=64, verbose=0),
    )

with nfdt.session(workers=2, evaluate=True):
    model.fit(x, y, verbose=0)
    weights = model.get_weights()
    plain_random = np.random.get_state()[1].tolist()
    os.mkdir(MARK)
    cluster = results()
    untouched = plain_random == np.random.get_state()[1].tolist()
    same_weights = all(map(np.array_equal, weights, model.get_weights()))
killed = not os.path.exists(MARK)
plain = results()

def close(a, b):
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-7))

mine, others = cluster["predicted"], plain["predicted"]
print(json.dumps(dict(
    names=list(cluster["logs"]) == list(plain["logs"]),
    logs=close(list(cluster["logs"].values()), list(plain["logs"].values())),
    types=[type(v).__name__ for v in cluster["values"]] == [type(v).__name__ for v in plain["values"]],
    values=close(cluster["values"], plain["values"]), fragile=close(cluster["fragile"], plain["fragile"]),
    outputs=bool(np.array_equal(cluster["outputs"], plain["outputs"])), after=close(cluster["after"], plain["after"]),
    structure=keras.tree.map_structure(lambda a: [str(a.dtype), list(a.shape)], mine)
        == keras.tree.map_structure(lambda a: [str(a.dtype), list(a.shape)], others),
    bits=all(map(np.array_equal, keras.tree.flatten(mine), keras.tree.flatten(others))),
    hooks=[type(one).__name__ for one in Hooks.seen], killed=killed, untouched=untouched, same_weights=same_weights,
)))
"""


@pytest.mark.long
def test_a_script_gets_the_results_of_keras_although_a_worker_is_killed(run_script):
    done = run_script(SCRIPT)
    result = answer(done)
    assert result.pop("hooks") == ["str", "dict"] * 2
    assert result == dict.fromkeys(result, True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("4/4 - ")]
    assert len(lines) == 2, done.stdout  # the last line of the bar, from the cluster and from Keras
    assert [line.partition("step - ")[2].split(" - ")[0] for line in lines] != ["", ""]
    assert done.stderr.count("is lost") == 1
