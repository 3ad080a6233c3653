"""Python objects that a ``train_step`` under ``run_eagerly`` changes: named before training, and set back."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.model.program.pack import pack

X, Y = np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")
SEEN: list[int] = []


class Step(keras.Model):
    """Model whose step calls a function of the model first."""

    def __init__(self, effect):
        super().__init__()
        self.dense, self.effect = keras.layers.Dense(1), effect
        self.count, self.rows, self.names, self.table = 0, [1], {"a": [2]}, np.zeros(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.effect(self)
        return super().train_step(data)


def packed(effect=lambda model: None, made=Step, **arguments):
    model = made(effect)
    model.compile("adam", "mse", metrics=["mae"], **arguments)
    pack(model, (X, Y))
    return model


def counted(model):
    model.count += 1


def appended(model):
    model.rows.append(len(model.rows))


def nested(model):
    model.names["a"].append(3)


def filled(model):
    model.table[1] = 5


def made(model):
    model._last = object()


EFFECTS = {"self.count": counted, "self.rows": appended, "self.names": nested, "self.table": filled, "self._last": made}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_step_changes_on_the_model_is_named(name, caplog):
    model = packed(EFFECTS[name], run_eagerly=True)
    assert f"train_step() of Step {model.name!r} changes {name}. With run_eagerly=True" in caplog.text
    assert caplog.text.count("on the workers only") == 1


def test_a_trial_leaves_no_trace_in_the_script():
    def all_but_nested(model):
        for effect in (counted, appended, filled, made):
            effect(model)

    model = packed(all_but_nested, run_eagerly=True)
    assert (model.count, list(model.rows), model.table.tolist(), hasattr(model, "_last")) == (0, [1], [0, 0], False)


def test_lists_around_the_step_are_named_and_set_back(caplog):
    inner: list[int] = []

    class Outer(Step):
        def train_step(self, data):
            inner.append(1)
            SEEN.append(1)
            return super().train_step(data)

    packed(made=Outer, run_eagerly=True)
    assert "changes SEEN, inner." in caplog.text
    assert SEEN == inner == []


def test_a_step_without_such_effects_is_not_warned_of(caplog):
    packed(run_eagerly=True)
    assert caplog.text == ""
