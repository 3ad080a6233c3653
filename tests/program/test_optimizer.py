import keras
import numpy as np
import pytest
from keras import layers

from nfdt.core.errors import CaptureError
from nfdt.model.program.optimizer import state_bytes
from nfdt.model.program.pack import pack

SHAPES = [(4, 3), (3,), (3, 1), (1,)]


def described(optimizer, batch):
    model = keras.Sequential([layers.Dense(3), layers.Dense(1, bias_constraint="non_neg")])
    model.compile(optimizer, "mse")
    return pack(model, batch).manifest


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (keras.optimizers.SGD(), 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        (keras.optimizers.Adam(amsgrad=True, use_ema=True), 4),
        (keras.optimizers.Nadam(), 2),
        (keras.optimizers.RMSprop(momentum=0.1, centered=True), 3),
        (keras.optimizers.Ftrl(), 2),
        (keras.optimizers.Lion(gradient_accumulation_steps=2), 2),
        (keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)), 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_slot_is_attributed_to_its_variable(optimizer, slots, batch):
    manifest = described(optimizer, batch)
    owners = manifest.optimizer_variables
    assert [tuple(o["shape"]) for o in owners] == [tuple(v.shape) for v in optimizer.variables]
    for index, shape in enumerate(SHAPES):
        mine = [tuple(o["shape"]) for o in owners if o["variable"] == index]
        assert mine == [shape] * slots
    assert manifest.is_elementwise
    assert manifest.constraints[:3] == [None] * 3
    assert manifest.constraints[3]["class_name"] == "NonNeg"


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adafactor(), keras.optimizers.Muon(), keras.optimizers.Lamb()])
def test_others_are_not_called_elementwise(optimizer, batch):
    assert not described(optimizer, batch).is_elementwise


def test_an_optimizer_that_gives_its_slots_values_when_it_is_built_is_attributed(batch):
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.01)
    owners = described(optimizer, batch).optimizer_variables
    assert [tuple(owner["shape"]) for owner in owners] == [tuple(v.shape) for v in optimizer.variables]
    assert [owner["variable"] for owner in owners] == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]


def test_an_optimizer_that_its_configuration_does_not_make_is_refused(batch):
    part = keras.optimizers.SGD()
    with pytest.raises(CaptureError, match=r"(?s)'multi_optimizer\w*': expected.*Received: .*lambda"):
        described(keras.optimizers.MultiOptimizer(lambda variable: part), batch)


def test_variables_excluded_from_weight_decay_are_named(batch):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.01, loss_scale_factor=8.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    manifest = described(optimizer, batch)
    assert manifest.decay == [True, False, True, False]
    assert manifest.optimizer_options["loss_scale_factor"] is None


def test_a_custom_optimizer_travels_as_code(batch, ship):
    class Sign(keras.optimizers.Optimizer):
        def __init__(self, learning_rate=0.1, strength=2.0, **kwargs):
            super().__init__(learning_rate=learning_rate, **kwargs)
            self.strength = strength

        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, self.strength * learning_rate * keras.ops.sign(gradient))

    model = keras.Sequential([layers.Dense(1)])
    model.compile(Sign(strength=5.0), "mse")
    arrived = ship(model, batch)
    assert arrived.packed.code
    assert arrived.model.optimizer.strength == 5.0
    np.testing.assert_allclose(arrived.model.train_on_batch(*batch), model.train_on_batch(*batch))


@pytest.mark.parametrize(
    ("optimizer", "vectors"),
    [
        (keras.optimizers.SGD(0.1), 0),
        (keras.optimizers.SGD(0.1, momentum=0.9), 1),
        (keras.optimizers.AdamW(1e-3), 2),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), 2),
    ],
)
def test_the_bytes_of_a_state_are_known_before_the_optimizer_has_variables(optimizer, vectors):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.compile(optimizer, "mse")
    assert state_bytes(model) == 4 * ((8 + 4) * (1 + vectors) + 4)
    assert not optimizer.built
