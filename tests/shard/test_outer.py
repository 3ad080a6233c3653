"""Shards of a job whose workers push weight deltas."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire.job_token import worker_token
from nfdt.jobserver.shard_clients import connect_shards
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.saved_state import saved
from tests.support.shard_cluster import LAYOUT, Reference, gradients, start_weights

TOKEN = "t" * 32


@pytest.fixture
def serve():
    running = []

    def start(**options):
        reference = Reference(keras.optimizers.Adam(0.01))
        algorithm = resolve_algorithm("group-sync", outer="delta", **options)
        state = State(reference.weights, reference.state)
        made = [
            start_shard(reference.manifest(), state, algorithm, i, 2, workers=2, token=TOKEN, leased=False)
            for i in range(2)
        ]
        running.extend(made)
        return reference.manifest(), [shard.address for shard in made]

    yield start
    [shard.stop(0) for shard in running]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_differences_are_gradients_of_an_outer_nesterov_optimizer(serve, momentum):
    _, addresses = serve(outer_momentum=momentum)
    outer = Reference(keras.optimizers.SGD(0.7, momentum=momentum, nesterov=momentum > 0))
    client = StreamClient(addresses, LAYOUT, "a", worker_token(TOKEN, "a"), timeout_s=20)
    assert np.array_equal(client.pull().weights, start_weights())
    for difference, rate in zip(gradients(3), (0.5, 1.0, 0.25), strict=True):
        outer.apply(rate * difference)
        answer = client.push(difference, samples=64, rate=rate)
        np.testing.assert_allclose(answer.weights, outer.weights, rtol=2e-5, atol=2e-6)
    client.close()


def test_delayed_differences_are_not_compensated_by_curvature(serve):
    """Reason: they are no gradients, and their product with a drift has no relation to the loss."""
    found = []
    for dc_lambda in (0.0, 50.0):
        _, addresses = serve(dc_lambda=dc_lambda)
        clients = [StreamClient(addresses, LAYOUT, name, worker_token(TOKEN, name), timeout_s=20) for name in "ab"]
        [client.pull() for client in clients]
        for name, difference in zip((0, 0, 0, 1, 0, 1), gradients(6), strict=True):
            found.append(clients[name].push(difference, samples=1).weights.copy())
        [client.close() for client in clients]
    assert np.array_equal(found[:6], found[6:])


def test_the_outer_optimizer_s_state_is_no_part_of_the_job_s(serve):
    manifest, addresses = serve()
    shards = connect_shards(addresses, manifest, TOKEN)
    try:
        state = saved(shards)
        assert state.optimizer == {}
        adam = {i: np.ones(e["shape"], e["dtype"]) for i, e in enumerate(manifest.optimizer_variables)}
        shards.write(State(2 * state.weights, adam))
        assert np.array_equal(saved(shards).weights, 2 * state.weights)
    finally:
        shards.close()
