"""Batch hooks on real clusters: exact ones read, set and stop as in plain Keras."""

from __future__ import annotations

import pytest

from tests.support.scripts import DIGITS, answer

pytestmark = pytest.mark.processes

PREAMBLE = (
    DIGITS
    + """
import glob, os, tempfile
import nfdt
import tensorflow as tf

x, y = x[:256], y[:256]
folder = tempfile.mkdtemp()
callbacks = keras.callbacks
out = {}

def dense(*layers):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16), *layers, keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def with_state():
    return dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=5))

class Look(callbacks.Callback):
    # Sets a rate for every batch, resets weights and a statistic in the fourth, stops after the twelfth.
    def __init__(self):
        super().__init__()
        self.seen = []
        self.equal = True

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.001 * (1 + batch)

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        result = {name: float(value) for name, value in model.get_metrics_result().items()}
        self.equal &= result == {name: float(value) for name, value in logs.items()}
        size = sum(float(np.abs(w).sum()) for w in model.get_weights())
        optimizer = model.optimizer
        rate, updates = float(optimizer.learning_rate), int(optimizer.iterations)
        self.seen.append([batch, updates, rate, size, logs["loss"]])
        if batch == 3:
            model.layers[0].set_weights([np.full((64, 16), 0.01), np.zeros(16)])
            if hasattr(model.layers[1], "moving_mean"):
                model.layers[1].moving_mean.assign(np.ones(16))
        if len(self.seen) == 12:
            model.stop_training = True

def looked_at(model, data, **arguments):
    look = Look()
    history = model.fit(*data, epochs=3, verbose=0, callbacks=[look], **arguments)
    return [look.seen, look.equal, history.history, int(model.optimizer.iterations)]

def arrays():
    return looked_at(with_state(), (x, y), batch_size=32, shuffle=False, validation_data=(x, y))

def stream():
    data = tf.data.Dataset.from_tensor_slices((x[:96], y[:96])).batch(32)
    return looked_at(with_state(), (data,))
"""
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, script_fork_server):
    """Provide the results of one script for all tests: a cluster's start costs more than the trainings."""
    script = tmp_path_factory.mktemp("hooks") / "script.py"
    script.write_text(
        PREAMBLE
        + """
out["plain"], out["plain_stream"] = arrays(), stream()
with nfdt.session(workers=2, batch_hooks="exact"):
    out["exact"], out["exact_stream"] = arrays(), stream()
with nfdt.session(workers=2):
    best = callbacks.ModelCheckpoint(
        os.path.join(folder, "{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=3
    )
    model = dense()
    model.fit(x, y, batch_size=32, epochs=2, verbose=0, callbacks=[best])
out["saved"] = {}
for file in sorted(glob.glob(os.path.join(folder, "*.weights.h5"))):
    model.load_weights(file)
    out["saved"][os.path.basename(file).partition(".")[0]] = int(model.optimizer.iterations)
print()
print(json.dumps(out))
"""
    )
    return answer(script_fork_server.run(script))


@pytest.mark.feature('Exact batch hooks (`batch_hooks="exact"`)', area="Callbacks")
@pytest.mark.parametrize("data", ["", "_stream"])
def test_exact_hooks_on_two_workers_see_what_they_see_in_keras(outcome, data):
    plain, exact = outcome["plain" + data], outcome["exact" + data]
    assert len(exact[0]) == len(plain[0]) == (9 if data else 12)
    for ours, theirs in zip(exact[0], plain[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    for name, values in plain[2].items():
        assert exact[2][name] == pytest.approx(values, rel=1e-3, abs=0.01)


def test_the_metrics_of_the_model_are_the_logs_of_each_batch(outcome):
    assert outcome["exact"][1]
    assert outcome["exact_stream"][1]


def test_stopping_in_an_exact_hook_leaves_as_many_updates_as_batches(outcome):
    assert outcome["exact"][3] == 12


def test_a_checkpoint_between_batches_holds_the_updates_of_its_batch(outcome):
    assert outcome["saved"] == {"1-3": 3, "1-6": 6, "2-1": 9, "2-4": 12, "2-7": 15}


@pytest.mark.long
@pytest.mark.horovod
def test_exact_hooks_stop_and_change_a_ring_at_their_batch(run_script):
    done = run_script(
        PREAMBLE
        + """
plain = looked_at(dense(), (x, y), batch_size=64, shuffle=False)
with nfdt.session(workers=2, algorithm="allreduce", batch_hooks="exact"):
    ring = looked_at(dense(), (x, y), batch_size=32, shuffle=False)
print()
print(json.dumps([plain, ring]))
"""
    )
    plain, ring = answer(done)
    assert ring[1]
    assert ring[3] == plain[3] == 12
    for ours, theirs in zip(ring[0], plain[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
