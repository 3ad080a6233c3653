"""Semantics of ``fit`` on the cluster, equal to Keras': callbacks, learning rates, continued training, arguments."""

from __future__ import annotations

import pytest

from tests.support.scripts import DIGITS, answer

PREAMBLE = (
    DIGITS
    + """
import os, tempfile
import nfdt

folder = tempfile.mkdtemp()
callbacks = keras.callbacks
x, y = x[:640], y[:640]
out = {}

def dense(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(10, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model

def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)

def same(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one.get_weights(), other.get_weights()))

def fit(model, **arguments):
    return model.fit(x, y, **{"batch_size": 64, "verbose": 0, "shuffle": False, **arguments})
"""
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, script_fork_server):
    """Provide the results of one script for all tests: a cluster's start costs more than the trainings."""
    script = tmp_path_factory.mktemp("fidelity") / "script.py"
    script.write_text(
        PREAMBLE
        + """
with nfdt.session(workers=1):
    # Every second half runs in plain Keras: the optimizer's state has come back.
    here = dense(momentum())
    fit(here, epochs=2)
fit(here, initial_epoch=2, epochs=4)
there = dense(momentum())
fit(there, epochs=4)
out["continued"] = same(here, there)

class Freeze(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = epoch < 1
frozen_later = dense(momentum())
fit(frozen_later, epochs=3, callbacks=[Freeze()])

weights = {label: 1.0 + label for label in range(10)}
arguments = dict(epochs=3, class_weight=weights, validation_split=0.25, steps_per_epoch=5)
plain = dense("adam")
plain_history = fit(plain, **arguments).history
with nfdt.session(workers=1):
    started = dense("adam")
    history = fit(started, **arguments).history
    out["arguments"] = same(started, plain)
    out["logs"] = max(abs(a - b) for k in plain_history for a, b in zip(history[k], plain_history[k]))
    out["keys"] = sorted(history) == sorted(plain_history)

    thawed = dense(momentum())
    fit(thawed, epochs=3, callbacks=[Freeze()])
    out["frozen_later"] = same(thawed, frozen_later)

    rates = []
    class Rates(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))
    model = dense(momentum())
    fit(model, epochs=3, callbacks=[callbacks.LearningRateScheduler(lambda epoch: [0.05, 0.0, 0.1][epoch]), Rates()])
    out["rates"] = rates
    model = dense(momentum())
    before = model.get_weights()
    fit(model, epochs=1, callbacks=[callbacks.LearningRateScheduler(lambda epoch: 0.0)])
    out["frozen"] = max(float(np.abs(a - b).max()) for a, b in zip(before, model.get_weights()))

    model = dense(momentum())
    stop = callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    best = callbacks.ModelCheckpoint(os.path.join(folder, "{epoch}.keras"))
    steps = callbacks.ModelCheckpoint(os.path.join(folder, "step.weights.h5"), save_freq=3, save_weights_only=True)
    log = callbacks.CSVLogger(os.path.join(folder, "log.csv"))
    board = callbacks.TensorBoard(os.path.join(folder, "board"))
    history = fit(model, epochs=9, callbacks=[stop, best, steps, log, board])
    out["stopped"] = len(history.history["loss"])
    out["restored"] = same(model, keras.saving.load_model(os.path.join(folder, "1.keras")))
    saved = [keras.saving.load_model(os.path.join(folder, name)) for name in ("1.keras", "2.keras")]
    out["checkpoints"] = same(*saved)
    out["files"] = sorted(os.listdir(folder))
    out["csv"] = len(open(os.path.join(folder, "log.csv")).read().splitlines())

    model = dense(momentum())
    plateau = callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)
    fit(model, epochs=4, callbacks=[plateau])
    out["plateau"] = float(model.optimizer.learning_rate)

    bad = x.copy()
    bad[3] = np.nan
    model = dense(momentum())
    history = model.fit(bad, y, epochs=5, verbose=0, callbacks=[callbacks.TerminateOnNaN()])
    out["nan_epochs"] = len(history.history["loss"])
    out["finite"] = bool(np.isfinite(model.get_weights()[0]).all())

    class Interrupt(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("the machine is gone")
    backup = callbacks.BackupAndRestore(os.path.join(folder, "backup"))
    try:
        fit(dense(momentum()), epochs=4, callbacks=[backup, Interrupt()])
    except RuntimeError as error:
        out["raised"] = str(error)
    model = dense(momentum())
    out["resumed"] = fit(model, epochs=4, callbacks=[backup]).epoch

    class Zero(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.set_weights([w * 0 for w in self.model.get_weights()])
    history = fit(dense(keras.optimizers.SGD(0.0)), epochs=2, callbacks=[Zero()])
    out["zeroed"] = history.history["loss"][1]

    models = [dense(momentum()), dense("adam")]
    out["two"] = [fit(m, epochs=2).history["loss"] for m in models]

print()
print(json.dumps(out))
"""
    )
    return answer(script_fork_server.run(script))


@pytest.mark.long
@pytest.mark.feature("Optimizer state comes back into the script", area="Optimizers")
def test_training_goes_on_locally_where_the_cluster_stopped(outcome):
    assert outcome["continued"] < 1e-4


@pytest.mark.feature("`class_weight`", "`validation_split`", "`steps_per_epoch`", area="Fit, evaluate and predict")
def test_class_weight_validation_split_and_steps_mean_what_they_mean_in_keras(outcome):
    assert outcome["keys"]
    assert outcome["arguments"] < 1e-4
    assert outcome["logs"] < 1e-3


@pytest.mark.feature("Layers that a callback freezes", area="Models")
def test_a_layer_that_a_callback_freezes_goes_on_as_in_keras(outcome):
    assert outcome["frozen_later"] < 1e-4


@pytest.mark.feature("`LearningRateScheduler`", area="Callbacks")
def test_a_scheduled_learning_rate_reaches_the_shards(outcome):
    assert outcome["rates"] == pytest.approx([0.05, 0.0, 0.1])
    assert outcome["frozen"] == 0.0


@pytest.mark.feature("`EarlyStopping`", area="Callbacks")
def test_early_stopping_ends_the_job_and_restores_the_best_weights(outcome):
    assert outcome["stopped"] == 2
    assert outcome["restored"] == 0.0


@pytest.mark.feature("`ModelCheckpoint`", area="Callbacks")
def test_checkpoints_hold_the_weights_of_their_moment(outcome):
    assert outcome["checkpoints"] > 0.0
    assert {"1.keras", "2.keras", "step.weights.h5", "log.csv", "board"} <= set(outcome["files"])
    assert outcome["csv"] == 3


@pytest.mark.feature("`ReduceLROnPlateau`", area="Callbacks")
def test_reduce_on_plateau_lowers_the_rate(outcome):
    assert outcome["plateau"] == pytest.approx(0.05 * 0.1**3, rel=1e-4)


@pytest.mark.feature("`TerminateOnNaN`", area="Callbacks")
def test_terminate_on_nan_stops_and_the_weights_stay_finite(outcome):
    assert outcome["nan_epochs"] == 1
    assert outcome["finite"]


@pytest.mark.feature("`BackupAndRestore`", area="Callbacks")
def test_backup_and_restore_resumes_at_the_epoch_that_was_lost(outcome):
    assert outcome["raised"] == "the machine is gone"
    assert outcome["resumed"][-1] == 3
    assert outcome["resumed"][0] in (1, 2)


@pytest.mark.feature("Weights that a callback sets", area="Callbacks")
def test_weights_set_by_a_callback_reach_the_workers(outcome):
    assert outcome["zeroed"] == pytest.approx(2.302585, abs=1e-4)


@pytest.mark.feature("Several models, one after the other", area="Models")
def test_several_models_train_in_one_session(outcome):
    assert all(last < first for first, last in outcome["two"])
