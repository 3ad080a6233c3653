import keras
import numpy as np
import pytest
from nfdt_client.model_state import ModelState

from nfdt.model.program.state import NO_WEIGHTS, State, load_state


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
    state.mark_known()
    model.layers[0].trainable = frozen_first
    assert state.changed_groups() == set()
    read = read_of(state)
    written = State(read.weights + 1, read.optimizer, {i: array + 1 for i, array in read.untrained.items()})
    state.write(written)
    assert state.changed_groups() == {"weights", *(["untrained"] if written.untrained else [])}
    np.testing.assert_array_equal(read_of(state).weights, written.weights)


def read_of(state):
    return load_state(b"".join(state.dump({"optimizer", "untrained"})))


def test_only_groups_that_changed_are_named(model):
    state = ModelState(model)
    state.mark_known()
    model.optimizer.learning_rate = 0.5
    assert state.changed_groups() == set()
    model.optimizer.variables[2].assign_add(np.ones(model.optimizer.variables[2].shape))
    assert state.changed_groups() == {"optimizer"}
    state.mark_known()
    model.layers[0].bias.assign(np.asarray(model.layers[0].bias))
    assert state.changed_groups() == set()
    model.layers[0].bias.assign([1.0, 0.0])
    assert state.changed_groups() == {"weights"}
    assert load_state(b"".join(state.dump({"weights"}))).optimizer == {}


def test_a_state_without_weights_leaves_them(model):
    before = model.get_weights()
    ModelState(model).write(State(NO_WEIGHTS, {2: np.full(model.optimizer.variables[2].shape, 3.0)}))
    assert all(map(np.array_equal, before, model.get_weights()))
    assert np.all(np.asarray(model.optimizer.variables[2]) == 3)
