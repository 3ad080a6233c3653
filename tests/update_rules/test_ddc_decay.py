"""DDC-ASGD with decoupled weight decay: the equilibrium weights do not depend on the number of workers."""

import numpy as np
import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from nfdt.update_rules.blocks import KernelBlocks
from tests.support.reference_optimizers import RMSprop
from tests.support.simulated_shard import SimulatedShard

SHAPE = (16, 16)
SIZE = SHAPE[0] * SHAPE[1]
DECAY, RATE = 0.5, 0.01
SGD = OptimizerTraits("sgd", momentum=0.9, decays=True)
NESTEROV = OptimizerTraits("sgd", momentum=0.9, nesterov=True, decays=True)
NO_MOMENTUM = OptimizerTraits("sgd", decays=True)
ADAM = OptimizerTraits("adam", decays=True)
OTHER_SGD = OptimizerTraits("other", normalizes=False, decays=True)
NORMALIZING = OptimizerTraits("other", decays=True)


def shard_of(traits, weights, *, optimizer=None, decay=DECAY):
    rule = make_rule(resolve_algorithm("ddc-asgd"), traits, KernelBlocks([SHAPE], [False]))
    return SimulatedShard(rule, weights, weight_decay=decay, **({"optimizer": optimizer} if optimizer else {}))


WORKERS = [8, pytest.param(32, marks=pytest.mark.long)]


def balance(traits, workers, mean, noise, **options):
    """Return the equilibrium weights for gradients ``mean`` plus noise and weight decay, all workers in turn."""
    rng, steps = np.random.default_rng(0), 4000
    shard = shard_of(traits, np.ones(SIZE), **options)
    for worker in range(workers):
        shard.pull(worker)
    rest = []
    for step in range(steps):
        shard.push(step % workers, mean + noise * rng.normal(size=SIZE), RATE)
        if step > steps / 2:
            rest.append(shard.weights.mean())
    return np.mean(rest)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("traits", "mean"), [(SGD, -0.05), (NESTEROV, -0.05), (NO_MOMENTUM, -0.5)], ids=["momentum", "nesterov", "plain"]
)
def test_sgd_and_decay_balance_where_they_do_on_one_machine(traits, mean, workers):
    assert balance(traits, workers, mean, -mean) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("workers", WORKERS)
def test_adam_and_decay_balance_where_they_do_on_one_machine(workers):
    alone = balance(ADAM, 1, -0.1, 1.0)
    assert balance(ADAM, workers, -0.1, 1.0) == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("traits", "optimizer"), [(OTHER_SGD, None), (NORMALIZING, RMSprop)], ids=["sgd", "rmsprop"])
def test_another_optimizer_and_decay_balance_where_they_do_on_one_machine(traits, optimizer, workers):
    alone = balance(traits, 1, -0.5, 1.5, optimizer=optimizer and optimizer())
    assert balance(traits, workers, -0.5, 1.5, optimizer=optimizer and optimizer()) == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("traits", [SGD, ADAM], ids=["momentum", "adam"])
def test_a_unit_without_gradients_for_long_learns_again(traits):
    """Reason: only decay moves such a unit, and movement by decay must not reduce the trust in later gradients."""
    rng, workers = np.random.default_rng(0), 8
    shard = shard_of(traits, np.ones(SIZE), decay=0.1)
    for worker in range(workers):
        shard.pull(worker)
    for step in range(2000):
        shard.push(step % workers, np.zeros(SIZE), RATE)
    idle = shard.weights.mean()
    for step in range(2000):
        shard.push(step % workers, -0.3 + rng.normal(size=SIZE), RATE)
    assert shard.weights.mean() > idle + 1.0


@pytest.mark.parametrize("traits", [SGD, ADAM, NO_MOMENTUM], ids=["momentum", "adam", "plain"])
def test_a_unit_without_gradients_decays_towards_zero(traits):
    shard = shard_of(traits, np.ones(SIZE))
    for worker in range(8):
        shard.pull(worker)
    for step in range(2000):
        shard.push(step % 8, np.zeros(SIZE), RATE)
    assert np.abs(shard.weights).max() < 0.05
