"""Variables that a program has besides the model's, and attributes of an eager model, are parts of its state."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.errors import ProtocolError
from nfdt.model.program.attributes import Attributes
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from nfdt.model.program.unpack import unpack_with_variables

BATCH = np.zeros((4, 3), "f4"), np.zeros((4, 1), "f4")


def build(loss="mse", **options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("sgd", loss, **options)
    return model


def unpacked(packed):
    return unpack_with_variables(packed.manifest, packed.artifacts.__getitem__, allow_code=True)


def with_variables():
    one, other = keras.Variable([1.0, 2.0], name="one"), tf.Variable(3, name="other")

    def loss(y, p):
        return keras.ops.mean(p - y) * one[0] + tf.cast(other, "float32")

    return build(loss, metrics=[keras.metrics.MeanSquaredError(), "mae"]), one, other


def test_they_follow_the_models_and_those_of_metrics_are_none():
    model, one, other = with_variables()
    packed = pack(model, BATCH)
    assert {id(variable) for variable in packed.outside} == {id(one), id(other)}
    entries = packed.manifest.untrained[len(model.non_trainable_variables) :]
    assert {(entry["path"], entry["rule"]) for entry in entries} == {("one", "mean"), ("other:0", "max")}


def test_the_loss_of_the_workers_model_reads_the_variables_that_the_state_is_assigned_to():
    model, one, other = with_variables()
    packed = pack(model, BATCH)
    arrived, variables = unpacked(packed)
    assert [np.asarray(v).tolist() for v in variables] == [np.asarray(v).tolist() for v in packed.outside]
    for variable in variables:
        variable.assign(np.asarray(variable) + 4)
    found = float(arrived.compute_loss(y=BATCH[1], y_pred=np.full((4, 1), 2.0, "f4")))
    assert found == 2.0 * 5.0 + 7.0


def test_a_program_without_any_has_none():
    assert pack(build(), BATCH).outside == ()
    assert pack(build(), BATCH, sources=["train"]).manifest.given == ["train"]


def test_data_that_the_script_may_change_begin_unchanged():
    packed = pack(build(), BATCH, sources=["train", "validation"])
    untrained = load_state(packed.artifacts[packed.manifest.state]).untrained
    assert [untrained[i].size for i in sorted(untrained)[-2:]] == [0, 0]


class Scaled(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.scale, self._kind, self.names = 1.0, "one", ["no", "plain", "value"]


def test_an_attribute_that_the_script_changes_is_set_on_a_worker_and_its_own_changes_stay():
    here, there = (keras.Sequential([keras.Input((3,)), Scaled()]) for _ in range(2))
    mine, theirs = Attributes(here), Attributes(there)
    assert mine.numpy().size == 0
    here.layers[0]._kind, here.layers[0].scale = "other", 2
    there.layers[0].calls = 5
    theirs.assign(mine.numpy())
    assert (there.layers[0].scale, there.layers[0]._kind, there.layers[0].calls) == (2, "other", 5)
    there.layers[0].scale = 7.0
    theirs.assign(mine.numpy())
    assert there.layers[0].scale == 7.0
    here.layers[0].scale = 1.0  # as in the program
    theirs.assign(mine.numpy())
    assert there.layers[0].scale == 1.0


def test_what_fit_and_evaluate_set_on_a_model_is_no_change():
    model = build("mse", run_eagerly=True)
    attributes = Attributes(model)
    model.fit(*BATCH, epochs=1, verbose=0, validation_data=BATCH)
    model.predict(BATCH[0], verbose=0)
    model.stop_training = True
    assert attributes.numpy().tobytes() == b""


@pytest.mark.parametrize("data", [b"no json", b'{"9.scale": 1}', b'{"x.scale": 1}'])
def test_other_values_are_refused(data):
    with pytest.raises(ProtocolError, match="Attributes"):
        Attributes(keras.Sequential([Scaled()])).assign(np.frombuffer(data, np.uint8))
