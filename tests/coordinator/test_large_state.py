"""Large untrained variables, such as frozen weights, in the messages between server and workers."""

from __future__ import annotations

import keras
import numpy as np

from nfdt.coordinator.untrained import StateMerger
from nfdt.model.training.merge import LARGE_BYTES
from nfdt.model.training.untrained_state import UntrainedState

RULES = [{"rule": "mean", "decay": None}, {"rule": "mean", "decay": None}]
FROZEN, MOVING = np.arange(LARGE_BYTES, dtype="f4"), np.zeros(LARGE_BYTES, "f4")


class Model:
    def __init__(self):
        self.non_trainable_variables = [keras.Variable(value, trainable=False) for value in (FROZEN, MOVING)]

    def _flatten_layers(self, include_self=True, recursive=True):
        return []


def workers(count):
    return [UntrainedState(Model(), RULES, worker=index) for index in range(count)]


def train(state, value):
    state.variables[1].assign(np.full(LARGE_BYTES, value, "f4"))
    return state.encode()


def test_frozen_weights_do_not_travel_and_changing_ones_do():
    merger, (one, other) = StateMerger(RULES, [FROZEN, MOVING]), workers(2)
    for epoch in (1, 2):
        if merger.encoded:
            for state in (one, other):
                state.load(merger.encoded)
        sent = train(one, 10 * epoch), train(other, 20 * epoch)
        assert max(map(len, sent)) < 1.1 * MOVING.nbytes
        merger.show([(0, 1, sent[0]), (1, 1, sent[1])], b"")
        merger.settle()
        assert len(merger.encoded) < 1.1 * MOVING.nbytes
        np.testing.assert_array_equal(merger.current[0], FROZEN)
        np.testing.assert_array_equal(merger.current[1], np.full(LARGE_BYTES, 15 * epoch))


def test_what_a_callback_has_changed_once_always_travels():
    merger, (worker,) = StateMerger(RULES, [FROZEN, MOVING]), workers(1)
    merger.replace([FROZEN + 1, MOVING])
    worker.load(merger.encoded)
    np.testing.assert_array_equal(worker.read()[0], FROZEN + 1)
    merger.replace([FROZEN, MOVING])  # as in the program again, which this worker no longer has
    worker.load(merger.encoded)
    np.testing.assert_array_equal(worker.read()[0], FROZEN)
    merger.show([(0, 1, worker.encode())], b"")
    merger.settle()
    np.testing.assert_array_equal(merger.current[0], FROZEN)
