"""Number of workers of a model whose state crosses from batch to batch."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from nfdt_client.program_checks import cluster_for

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import ClusterSpec, resolve_algorithm
from nfdt.model.backends.variables import values_of
from nfdt.model.program.pack import pack
from nfdt.model.program.unpack import unpack
from nfdt.model.program.untrained import untrained_variables

X, Y = np.ones((4, 3, 2), "float32"), np.zeros((4, 1), "float32")


@pytest.fixture
def model():
    keras.utils.set_random_seed(1)
    layers = [keras.Input(batch_shape=(4, 3, 2)), keras.layers.GRU(2, stateful=True, name="memory")]
    made = keras.Sequential([*layers, keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize("algorithm", ["ddc-asgd", "bsp", "ssp", "auto"])
def test_one_worker_trains_it_and_a_warning_states_why(model, algorithm, caplog):
    found = cluster_for(model, resolve_algorithm(algorithm), ClusterSpec(workers=4, shards=2))
    assert (found.workers, found.shards) == (1, 2)
    assert "on one worker, not on 4, because with stateful=True (layers: 'memory')" in caplog.text


@pytest.mark.parametrize("algorithm", ["allreduce", "group-sync"])
def test_ranks_that_are_several_are_refused_with_a_remedy(model, algorithm):
    with pytest.raises(UsageError, match=r"expected one worker.*stateful=True.*Received: 4 ranks.*Use algorithm="):
        cluster_for(model, resolve_algorithm(algorithm), ClusterSpec(workers=4))


def test_nothing_changes_for_one_worker_or_without_such_a_layer(model, caplog):
    caplog.set_level(logging.WARNING)
    one, four = ClusterSpec(workers=1), ClusterSpec(workers=4)
    assert cluster_for(model, resolve_algorithm("ddc-asgd"), one) is one
    plain = keras.Sequential([keras.Input((3, 2)), keras.layers.GRU(2), keras.layers.Dense(1)])
    assert cluster_for(plain, resolve_algorithm("ddc-asgd"), four) is four
    assert caplog.text == ""


def test_the_state_travels_with_the_program_and_no_check_changes_it(model):
    model.predict(X, verbose=0)
    states = untrained_variables(model)[len(model.non_trainable_variables) :]
    before = values_of(states)
    assert any(np.abs(value).sum() for value in before)
    program = pack(model, (X, Y))
    for value, state in zip(before, states, strict=True):
        np.testing.assert_array_equal(state.numpy(), value)
    rebuilt = unpack(program.manifest, program.artifacts.__getitem__, allow_code=False)
    for value, state in zip(values_of(untrained_variables(model)), untrained_variables(rebuilt), strict=True):
        np.testing.assert_array_equal(state.numpy(), value)
