"""Which models have a step that is one update of every variable, and which optimizers step on the workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from nfdt.model.program.local_optimizers import state_variables
from nfdt.model.program.pack import pack
from nfdt.model.program.unpack import unpack
from tests.support.several_optimizers import diffusion, gan, optimizers_of, points

X = points(8)


class Step(keras.Model):
    """Model whose step calls a function of the model and the gradient of its loss."""

    def __init__(self, update):
        super().__init__()
        self.dense, self.update = layers.Dense(1), update

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self(x) ** 2)
        self.update(self, tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


def once(model, gradients):
    model.optimizer.apply(gradients, model.trainable_variables)


def in_parts(model, gradients):
    for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
        model.optimizer.apply([gradient], [variable])


def twice(model, gradients):
    once(model, gradients)
    once(model, gradients)


def in_a_loop(model, gradients):
    def body(turn):
        once(model, gradients)
        return [turn + 1]

    tf.while_loop(lambda turn: turn < 3, body, [tf.constant(0)])


def clipped(model, gradients):
    once(model, gradients)
    for variable in model.trainable_variables:
        variable.assign(keras.ops.clip(variable, -0.1, 0.1))


def nested(model, gradients):
    tf.function(lambda: once(model, gradients))()


def packed(update, **options):
    model = Step(update)
    model.compile(keras.optimizers.SGD(0.1), **options)
    return pack(model, X).manifest


@pytest.mark.parametrize("update", [once, in_parts, nested])
def test_one_update_of_each_variable_is_the_shards_task(update):
    assert not packed(update).steps_on_workers


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize(("update", "calls"), [(twice, 2), (clipped, 1)])
def test_more_than_one_update_is_the_workers_task(update, calls, options):
    manifest = packed(update, **options)
    (entry,) = manifest.local_optimizers
    assert entry == {"variables": [0, 1], "applications": calls, "attributes": {}, "decay": [[True, True]]}
    assert manifest.optimizer_class == "SGD"
    assert manifest.optimizer_options["learning_rate"] == 1.0


@pytest.mark.parametrize("eager", [False, True])
def test_the_dictionaries_in_the_logs_of_a_step_are_known(eager):
    class Grouped(Step):
        def train_step(self, x):
            loss = super().train_step(x)["loss"]
            return {"z": loss, "outer": {"y": loss, "inner": {"x": loss}}}

    model = Grouped(once)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
    assert pack(model, X).log_groups == {"y": ("outer",), "x": ("outer", "inner")}
    assert "train_step" not in vars(model)


def test_an_update_in_a_loop_of_the_graph_may_repeat():
    assert packed(in_a_loop).steps_on_workers


@pytest.mark.parametrize("eager", [False, True])
def test_the_trial_leaves_the_model_as_it_was(eager):
    model = diffusion()
    model.run_eagerly = eager
    model.optimizer.build(model.network.trainable_variables)
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    pack(model, X)
    for variable, value in zip((*model.variables, *model.optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(variable, value, err_msg=variable.path)
    assert not {"apply", "assign"} & {name for v in (model.optimizer, *model.variables) for name in vars(v)}


def test_optimizers_arrive_with_their_state_attributes_and_excluded_variables():
    model = gan(d_optimizer=keras.optimizers.AdamW(0.01), g_optimizer=keras.optimizers.SGD(0.01, momentum=0.5))
    model.d_optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.g_optimizer.note = "of the script"
    program = pack(model, X)
    model.g_optimizer.variables[2].assign(keras.ops.ones_like(model.g_optimizer.variables[2]))
    program = pack(model, X)
    arrived = unpack(program.manifest, program.artifacts.__getitem__, allow_code=True)
    assert arrived.g_optimizer.note == "of the script"
    used = [arrived.d_optimizer._use_weight_decay(v) for v in arrived.discriminator.trainable_variables]
    assert used == [True, False, True, False]
    assert optimizers_of(arrived).keys() == optimizers_of(model).keys() == {"d", "g"}, "compile() made one unused"
    for mine, theirs in zip(*(state_variables(m, program.manifest) for m in (arrived, model)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
