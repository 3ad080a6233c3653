"""Simulated allreduce with ``scale_lr`` and ``warmup_epochs``: plain Keras at the scaled learning rate."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from nfdt_client.options import resolve, resolve_each

from nfdt.core.errors import UsageError
from tests.support.simulated_jobs import Kept, X, Y, as_text, build, cluster, simulate

BATCH, MACHINES = 5, 4  # 5 global batches in an epoch, the last one of 16 rows
STEPS = 5
WHOLE = {"linear": 4.0, "sqrt": 2.0}


def flat(model):
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables])


def compiled(rate):
    model = build()
    model.compile(keras.optimizers.SGD(rate, momentum=0.5, weight_decay=0.1), "mse")
    return model


@pytest.mark.processes
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(("warmup", "scheduled"), [(0, False), (1.6, True)])
def test_a_ring_is_one_machine_at_the_scaled_rate(kind, warmup, scheduled):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.002, 4, 0.7)
    ours, plain = compiled(schedule if scheduled else 0.002), compiled(0.002)
    options = {"scale_lr": kind, "warmup_epochs": warmup, "batch_size": BATCH, "shuffle": False, "epochs": 3}
    simulate(cluster({"count": MACHINES}), "allreduce", model=ours, **options)
    rising = 8 if warmup else 0  # 1.6 epochs
    for step in range(3 * STEPS):
        factor = 1 + (WHOLE[kind] - 1) * min(1, (step + 1) / (rising + 1))
        plain.optimizer.learning_rate = float(schedule(step) if scheduled else 0.002) * factor
        rows = slice(MACHINES * BATCH * (step % STEPS), MACHINES * BATCH * (step % STEPS + 1))
        plain.train_on_batch(X[rows], Y[rows])
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-4, atol=1e-5)
    if not scheduled:
        assert float(ours.optimizer.learning_rate) == pytest.approx(0.002), "the trained model keeps its rate"


def test_presets_without_a_ring_refuse_it_and_ignore_it_in_a_comparison():
    given = {"scale_lr": "linear", "warmup_epochs": 1, "workers": 2}
    with pytest.raises(UsageError, match="scale_lr.*allreduce"):
        resolve({**given, "algorithm": "bsp"}, environ={})
    compared, _ = resolve_each(given, ["bsp", "allreduce"], environ={})
    described = cluster({"count": 2})
    with Kept(compared, described) as session:
        build().fit(X, Y, batch_size=BATCH, verbose=0)
    assert as_text(session.jobs[0]) == as_text(simulate(described, "bsp", batch_size=BATCH)[0])


def test_batches_of_a_generator_are_refused():
    def batches():
        while True:
            yield X[:BATCH], Y[:BATCH]

    with pytest.raises(UsageError, match="scale_lr.*expected arrays.*Received: data of kind 'stream'"):
        simulate(cluster({"count": 2}), "allreduce", x=batches(), y=None, steps_per_epoch=4, scale_lr="linear")
