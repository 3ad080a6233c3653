"""Engine of a shard that serves a second job: its compiled functions, and the state of a new one."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from nfdt.shard.building import KeptEngine, build_store
from nfdt.shard.messages import Gradient

keras = pytest.importorskip("keras")

X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


def make_model():
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


@pytest.fixture
def model():
    return make_model()


def program(model):
    packed = pack(model, (X, Y))
    return packed.manifest, load_state(packed.artifacts[packed.manifest.state])


def trained(store, steps=3):
    """Return the state of a store after some pushes of one worker."""
    store.pull("w")
    for step in range(1, steps + 1):
        store.push("w", Gradient(step, np.full(store.size, step / 10, np.float32)))
    return store.read()


def build(model, kept=None, algorithm="ddc-asgd", shards=1, workers=1):
    return build_store(*program(model), resolve_algorithm(algorithm), 0, shards, workers=workers, kept=kept)


@pytest.mark.parametrize("algorithm", ["asgd", "dc-asgd-a", "ddc-asgd"])
def test_a_second_job_has_the_functions_of_the_first_and_the_result_of_a_new_engine(model, algorithm):
    kept = KeptEngine()
    first = build(model, kept, algorithm)
    trained(first)
    model.set_weights([w + 1 for w in model.get_weights()])
    model.optimizer.learning_rate = 0.1
    second = build(model, kept, algorithm)
    assert second._engine is first._engine
    assert second.version == 0
    weights, optimizer = trained(second)
    expected_weights, expected_optimizer = trained(build(model, None, algorithm))
    np.testing.assert_array_equal(weights, expected_weights)
    for index, value in expected_optimizer.items():
        np.testing.assert_array_equal(optimizer[index], value)


def test_a_model_that_was_built_again_is_the_same_program(model):
    kept = KeptEngine()
    first = build(model, kept)
    assert build(make_model(), kept)._engine is first._engine


def test_other_terms_need_a_new_engine(model):
    kept = KeptEngine()
    first = build(model, kept)
    assert build(model, kept, "asgd")._engine is not first._engine
    again = build(model, kept)
    assert build(model, kept, workers=2)._engine is not again._engine, "rules of differences divide by the workers"
    again = build(model, kept)
    model.compile(keras.optimizers.Adam(0.2), "mse")
    assert build(model, kept)._engine is not again._engine


def test_an_optimizer_whose_state_is_not_known_exactly_is_built_anew(model):
    model.compile(keras.optimizers.Nadam(0.1), "mse")
    kept = KeptEngine()
    assert build(model, kept, "asgd")._engine is not build(model, kept, "asgd")._engine
