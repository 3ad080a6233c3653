"""Callbacks between two epochs: they decide as those of Keras on a model, with a state that is JSON between epochs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.specs.callbacks import CallbackSpec, CallbacksSpec

keras = pytest.importorskip("keras")

from nfdt.model.training.epoch_callbacks import EpochCallbacks, EpochEnd, dump_callbacks  # noqa: E402

LOSSES = [1.0, 0.8, 0.79, 0.9, 0.95, 0.5, 0.6, 0.61, 0.62, 0.63, 0.64, 0.65]


def logs_of(epoch, losses):
    return {"loss": losses[epoch], "accuracy": 1.0 - losses[epoch], "val_loss": losses[epoch] / 2}


def halve(epoch, rate):
    return rate / 2 if epoch % 3 == 2 else rate


CASES = {
    "stops": lambda c: [c.EarlyStopping("val_loss", patience=2)],
    "restores": lambda c: [c.EarlyStopping("loss", patience=3, restore_best_weights=True)],
    "restores at the end": lambda c: [c.EarlyStopping("loss", patience=50, restore_best_weights=True)],
    "more is better": lambda c: [c.EarlyStopping("accuracy", patience=1, mode="max", min_delta=0.05)],
    "direction of a metric": lambda c: [c.EarlyStopping("accuracy", patience=2, restore_best_weights=True)],
    "baseline": lambda c: [c.EarlyStopping("loss", patience=2, baseline=0.7, restore_best_weights=True)],
    "later": lambda c: [c.EarlyStopping("loss", patience=1, start_from_epoch=4, restore_best_weights=True)],
    "reduces": lambda c: [c.ReduceLROnPlateau("loss", factor=0.3, patience=1, cooldown=1, min_lr=0.01)],
    "reduces by little": lambda c: [c.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.2)],
    "schedule": lambda c: [c.LearningRateScheduler(halve)],
    "schedule of the epoch": lambda c: [c.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))],
    "two": lambda c: [c.LearningRateScheduler(halve), c.ReduceLROnPlateau("loss", patience=2)],
    "NaN": lambda c: [c.TerminateOnNaN(), c.EarlyStopping("loss", patience=50, restore_best_weights=True)],
}


def compiled():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["accuracy"], run_eagerly=True)
    model.train_on_batch(np.ones((2, 1)), np.ones((2, 1)))  # creates the metrics
    return model


def in_keras(make, losses):
    """Return the learning rates of the epochs, the history, and the epoch whose weights the model has at the end."""
    model = compiled()
    hooks = keras.callbacks.CallbackList(make(keras.callbacks), model=model, add_history=True)
    rates = []
    model.stop_training = False
    hooks.on_train_begin()
    for epoch in range(len(losses)):
        hooks.on_epoch_begin(epoch)
        rates.append(float(model.optimizer.learning_rate))
        model.set_weights([np.full((1, 1), float(epoch))])
        hooks.on_train_batch_end(4, logs_of(epoch, losses))
        hooks.on_epoch_end(epoch, logs_of(epoch, losses))
        if model.stop_training:
            break
    hooks.on_train_end({})
    return rates, model.history.history, int(model.get_weights()[0][0, 0])


def between_epochs(make, losses):
    """Return the same of callbacks that are made anew at the end of each epoch."""
    model, callbacks = compiled(), make(keras.callbacks)
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
    for callback in callbacks:
        callback.on_epoch_begin(0)
    members = tuple(CallbackSpec(kind=type(one).__name__, code="0" * 64) for one in callbacks)
    members = tuple(one if one.kind == "LearningRateScheduler" else CallbackSpec(kind=one.kind) for one in members)
    state = dump_callbacks(callbacks, float(model.optimizer.learning_rate))
    schedule = next((one.schedule for one in callbacks if hasattr(one, "schedule")), None)
    rates, history, result = [float(model.optimizer.learning_rate)], {}, 0
    for epoch in range(len(losses)):
        end = EpochEnd(epoch, 5, epoch + 1 == len(losses), logs_of(epoch, losses))
        spec = CallbacksSpec(members=members, state=state)
        decision, logs = EpochCallbacks(spec, lambda _: schedule, model.metrics).decide(state, end)
        for name, value in logs.items():
            history.setdefault(name, []).append(value)
        state, result = decision.state, epoch if decision.restored is None else decision.restored
        assert decision.restored is None or decision.restored in decision.kept
        if decision.stop or end.is_last:
            break
        rates.append(decision.learning_rate)
    return rates, history, result


@pytest.mark.parametrize("case", CASES)
def test_callbacks_decide_between_epochs_as_in_keras(case):
    losses = LOSSES if case != "NaN" else [*LOSSES[:4], math.nan, *LOSSES[5:]]
    expected, received = in_keras(CASES[case], losses), between_epochs(CASES[case], losses)
    assert received[0] == expected[0]
    np.testing.assert_equal(received[1], expected[1])
    assert received[2] == expected[2]


def decide(*callbacks, losses=LOSSES, epoch=0, load=None):
    for callback in callbacks:
        callback.on_train_begin()
    state = dump_callbacks(callbacks, 0.1)
    spec = CallbacksSpec(members=tuple(CallbackSpec(kind=type(one).__name__) for one in callbacks), state=state)
    return EpochCallbacks(spec, load, []).decide(state, EpochEnd(epoch, 5, False, logs_of(epoch, losses)))[0]


def test_what_callbacks_print_and_warn_of_is_returned(capsys):
    reduce = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, mode="max", verbose=1)
    missing = keras.callbacks.EarlyStopping("val_f1", mode="max")
    reduce.on_train_begin()
    state = json.loads(dump_callbacks([reduce, missing], 0.1))
    state["members"][0]["attributes"]["best"] = 2.0
    kinds = tuple(CallbackSpec(kind=kind) for kind in ("ReduceLROnPlateau", "EarlyStopping"))
    text = json.dumps(state)
    callbacks = EpochCallbacks(CallbacksSpec(members=kinds, state=text), None, [])
    decision, _ = callbacks.decide(text, EpochEnd(3, 5, False, logs_of(3, LOSSES)))
    assert decision.learning_rate == pytest.approx(0.05)
    assert any("reducing learning rate to" in line for line in decision.messages)
    assert any("`val_f1` which is not available" in line for line in decision.messages)
    assert capsys.readouterr().out == ""


def test_an_error_that_a_callback_raises_is_its_own():
    with pytest.raises(RuntimeError, match="NaN or Inf loss"):
        decide(keras.callbacks.TerminateOnNaN(raise_error=True), losses=[math.inf])


@pytest.mark.parametrize(
    "state",
    ["no JSON", "[]", '{"learning_rate": 0.1, "members": []}', '{"learning_rate": 0.1, "members": [1]}'],
)
def test_a_state_of_other_callbacks_is_refused(state):
    spec = CallbacksSpec(members=(CallbackSpec(kind="EarlyStopping"),), state=state)
    with pytest.raises(ProtocolError, match="State of callbacks"):
        EpochCallbacks(spec, None, []).decide(state, EpochEnd(0, 5, False, {}))
