import keras
import numpy as np
import pytest
from nfdt_client.model_state import ModelState


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    made.optimizer.build(made.trainable_variables)
    return made


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_layer_frozen_or_thawed_later_changes_nothing(model, frozen_first):
    model.layers[0].trainable = not frozen_first
    state = ModelState(model)
    before = state.read()
    model.layers[0].trainable = frozen_first
    after = state.read()
    assert not state.differs(before, after)
    written = type(after)(after.weights + 1, after.optimizer, {i: a + 1 for i, a in after.untrained.items()})
    state.write(written)
    assert state.differs(before, state.read())
    np.testing.assert_array_equal(state.read().weights, written.weights)
