"""Weights of a worker that makes steps while its pushes are on their way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nfdt.simulate.local_steps import OwnVector
from nfdt.transport.base import Pulled
from nfdt.worker.local_weights import LocalWeights


def pulled(weights, sequence):
    return Pulled(np.array(weights, np.float64), (0,), sequence)


def test_steps_while_a_push_travels_count_once():
    vector = OwnVector()
    own = LocalWeights(vector)
    own.follow(pulled([10.0], 1))
    vector.weights -= 1
    own.stepped()
    np.testing.assert_array_equal(own.difference(), [1.0])
    vector.weights -= 2  # the reply is not there yet
    own.stepped()
    own.follow(pulled([10.0], 1))
    np.testing.assert_array_equal(vector.weights, [7.0])
    own.follow(pulled([5.0], 2))  # others have moved the weights to 5
    np.testing.assert_array_equal(vector.weights, [3.0])
    vector.weights -= 4
    own.stepped()
    np.testing.assert_array_equal(own.difference(), [6.0])


def test_without_steps_the_weights_received_are_taken():
    vector = OwnVector()
    own = LocalWeights(vector)
    own.follow(pulled([10.0], 1))
    vector.weights -= 1
    own.stepped()
    own.difference()
    own.follow(pulled([8.0], 2))
    np.testing.assert_array_equal(vector.weights, [8.0])


def test_after_forgetting_nothing_is_carried_over():
    vector = OwnVector()
    own = LocalWeights(vector)
    own.follow(pulled([10.0], 1))
    vector.weights -= 1
    own.stepped()
    own.forget()
    own.follow(pulled([4.0], 1))
    np.testing.assert_array_equal(vector.weights, [4.0])


def test_the_memory_of_a_reply_is_not_used_later():
    vector, reply = OwnVector(), pulled([10.0], 1)
    own = LocalWeights(vector)
    own.follow(reply)
    reply.weights[:] = np.nan
    vector.weights -= 1
    own.stepped()
    np.testing.assert_array_equal(own.difference(), [1.0])


@given(st.lists(st.tuples(st.sampled_from(["step", "push", "reply"]), st.floats(-2, 2)), max_size=40))
def test_one_worker_is_where_it_would_be_alone(events):
    """Whatever the delays of its replies, the weights of a worker without others are those of its steps alone."""
    vector, shard, alone, waiting, sequence = OwnVector(), 10.0, 10.0, [], 1
    own = LocalWeights(vector)
    own.follow(pulled([shard], sequence))
    for kind, amount in events:
        if kind == "step":
            vector.weights = vector.weights - amount
            alone -= amount
            own.stepped()
        elif kind == "push" and not waiting:
            shard -= own.difference()[0]
            waiting.append(shard)
        elif kind == "reply" and waiting:
            sequence += 1
            own.follow(pulled([waiting.pop()], sequence))
        np.testing.assert_allclose(vector.weights, [alone], atol=1e-9)
