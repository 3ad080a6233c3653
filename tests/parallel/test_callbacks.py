"""Effects of each callback on models, logs and learning rates."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hfdt.keras as hvd
from nfdt.core.errors import UsageError
from tests.support.rank_training import CLASSES, FEATURES, dense_model

BATCHES = 4


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank())
    return rng.normal(size=(BATCHES * 2, FEATURES)).astype("float32"), rng.integers(0, CLASSES, BATCHES * 2)


def train(callbacks, optimizer=None, epochs=1, model=None, **options):
    """Fit on every rank, with its own data; returns the model and the history."""
    model = model or dense_model()
    chosen = hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    model.compile(chosen, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(*data(), batch_size=2, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return model, history.history


class Rates(keras.callbacks.Callback):
    """Callback that records the learning rate in each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate.numpy()))


def test_the_root_s_weights_and_optimizer_state_are_everyone_s():
    keras.utils.set_random_seed(hvd.rank())
    model = dense_model()
    model.compile(keras.optimizers.SGD(0.1 * (hvd.rank() + 1), momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(10 * hvd.rank())
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    callback.set_model(model)
    callback.on_train_begin()
    state = np.concatenate([np.ravel(v.numpy()) for v in [*model.weights, *model.optimizer.variables]])
    np.testing.assert_array_equal(np.asarray(hvd.allgather(state[None])), [state] * hvd.size())
    assert int(model.optimizer.iterations) == 10
    assert callback.broadcast_done


class BuiltByFit(keras.Model):
    """Model whose weights are created with the first batch."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(CLASSES, activation="softmax")

    def call(self, inputs):
        return self.last(inputs)


@pytest.mark.parametrize("built_on", ["no rank", "rank 0"])
@pytest.mark.parametrize("kind", [BuiltByFit, lambda: keras.Sequential([keras.layers.Dense(CLASSES, "softmax")])])
def test_models_that_the_first_batch_builds_are_made_equal_after_it(kind, built_on):
    keras.utils.set_random_seed(hvd.rank())
    model = kind()
    if built_on == "rank 0" and hvd.rank() == 0:
        model.build((None, FEATURES))
    train([hvd.callbacks.BroadcastGlobalVariablesCallback(0)], keras.optimizers.Adam(), model=model)
    state = np.concatenate([np.ravel(v.numpy()) for v in [*model.weights, *model.optimizer.variables]])
    np.testing.assert_array_equal(np.asarray(hvd.allgather(state[None])), [state] * hvd.size())


def test_it_sends_once():
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model, _ = train([callback])
    model.optimizer.learning_rate = 0.1 + hvd.rank()
    model.fit(*data(), batch_size=2, verbose=0, callbacks=[callback])
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1 + hvd.rank())


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "argument"])
def test_a_local_variable_is_not_sent(registered):
    model = dense_model()
    local = model.layers[0].bias
    local.assign(local + hvd.rank())
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=None if registered else local)
    if registered:
        callback.register_local_var(local)
    model.compile(keras.optimizers.SGD(), loss="mse")
    callback.set_model(model)
    callback.on_train_begin()
    assert local.numpy().tolist() == [float(hvd.rank())] * 8


def test_frozen_weights_keep_their_bits():
    model = dense_model()
    model.layers[0].trainable = False
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    seen = []
    remember = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(model.layers[0].kernel.numpy())
    )
    train([callback, remember], model=model)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), seen[0])


def test_metrics_are_averaged_for_the_callbacks_behind_and_the_history():
    seen = []
    before = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    behind = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    _, history = train([before, hvd.callbacks.MetricAverageCallback(), behind], validation_data=data())
    own, averaged = seen
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        of_all = np.asarray(hvd.allgather(np.asarray([own[name]], "float64")))
        assert averaged[name] == pytest.approx(of_all.mean(), rel=1e-12)
        assert history[name] == [averaged[name]]


def test_a_metric_of_rank_0_alone_reaches_all():
    logs = {"loss": float(hvd.rank())} | ({"val_loss": 0.25} if hvd.rank() == 0 else {})
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2, "val_loss": 0.25}


def test_arrays_in_the_logs_are_averaged_too():
    logs = {"f1": np.asarray([hvd.rank(), 1.0], "float32"), "of_another_length": np.zeros(1 + hvd.rank()), "text": "a"}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    np.testing.assert_array_equal(logs["f1"], np.asarray([(hvd.size() - 1) / 2, 1.0], "float32"))
    np.testing.assert_array_equal(logs["of_another_length"], [0.0])
    assert logs["text"] == "a"


def test_callbacks_that_read_the_logs_decide_alike_on_all_ranks():
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=10.0)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=10.0)
    average = hvd.callbacks.MetricAverageCallback()
    model, history = train([hvd.callbacks.BroadcastGlobalVariablesCallback(0), average, plateau, stop], epochs=6)
    decided = [len(history["loss"]), float(model.optimizer.learning_rate.numpy())]
    np.testing.assert_array_equal(np.asarray(hvd.allgather(np.asarray([decided]))), [decided] * hvd.size())
    assert decided[0] < 6


def test_the_warm_up_raises_the_rate_batch_by_batch():
    rates, size = Rates(), hvd.size()
    warm_up = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2)
    _, history = train([warm_up, rates], keras.optimizers.SGD(0.4), epochs=3)
    shares = np.minimum(np.arange(1, 3 * BATCHES + 1) / (2 * BATCHES), 1.0)
    np.testing.assert_allclose(rates.seen, 0.4 / size * (1 + shares * (size - 1)), rtol=1e-6)
    np.testing.assert_allclose(history["lr"], rates.seen[BATCHES - 1 :: BATCHES], rtol=1e-6)
    assert rates.seen[-1] == pytest.approx(0.4)


def test_rank_0_reports_the_end_of_the_warm_up(capsys):
    train([hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1, verbose=1)])
    reported = "Epoch 1: finished gradual learning rate warmup to 0.1." in capsys.readouterr().out
    assert reported == (hvd.rank() == 0)


def test_a_staircase_acts_once_per_epoch_between_two_epochs():
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, multiplier=lambda epoch: 10.0**epoch, start_epoch=1, end_epoch=3
    )
    train([schedule, rates], keras.optimizers.SGD(0.5), epochs=4)
    np.testing.assert_allclose(rates.seen[::BATCHES], [0.5, 1.0, 10.0, 10.0], rtol=1e-6)


def test_a_number_is_an_exponential_decay():
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.8, multiplier=0.5, start_epoch=1)
    train([schedule, rates], keras.optimizers.SGD(0.8), epochs=3)
    np.testing.assert_allclose(rates.seen[::BATCHES], [0.8, 0.8, 0.4], rtol=1e-6)


def test_without_a_staircase_the_rate_moves_in_each_batch():
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        1.0, multiplier=lambda epoch: epoch, staircase=False, steps_per_epoch=BATCHES
    )
    train([schedule, rates], keras.optimizers.SGD(1.0), epochs=2)
    np.testing.assert_allclose(rates.seen, np.arange(2 * BATCHES) / BATCHES, rtol=1e-6)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("scaled", [True, False], ids=["loss scaled", "plain"])
def test_momentum_follows_the_rate(correct, scaled):
    model = dense_model()
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(keras.optimizers.LossScaleOptimizer(sgd) if scaled else sgd, loss="mse")
    model.optimizer.build(model.trainable_variables)
    sgd.momentums[0].assign(np.ones(sgd.momentums[0].shape))
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.2, multiplier=1.0, momentum_correction=correct)
    schedule.set_model(model)
    schedule.set_params({"steps": BATCHES})
    schedule.on_train_begin()
    schedule.on_epoch_begin(0)
    schedule.on_train_batch_begin(0)
    np.testing.assert_allclose(sgd.momentums[0].numpy(), 2.0 if correct else 1.0)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.2)


def test_an_optimizer_with_a_schedule_is_refused():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(UsageError, match="has a schedule"):
        train([hvd.callbacks.LearningRateWarmupCallback(0.1)], keras.optimizers.SGD(rate))


def test_data_of_unknown_length_needs_steps_per_epoch():
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1)
    model = dense_model()
    model.compile(keras.optimizers.SGD(), loss="mse")
    warm_up.set_model(model)
    warm_up.set_params({"steps": None})
    with pytest.raises(UsageError, match="steps_per_epoch"):
        warm_up.on_train_begin()


def test_a_missing_rate_is_refused():
    with pytest.raises(UsageError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, multiplier=1.0)
