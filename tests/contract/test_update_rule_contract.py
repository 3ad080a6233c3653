"""Promises of every update rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import AXES, RULE_FACTS
from nfdt.update_rules import RULES, OptimizerTraits, make_rule
from nfdt.update_rules.blocks import KernelBlocks
from tests.support.reference_optimizers import SGD, Adam, RMSprop
from tests.support.simulated_shard import SimulatedShard

OPTIMIZERS = {
    "sgd": (OptimizerTraits("sgd"), SGD),
    "momentum": (OptimizerTraits("sgd", momentum=0.9), lambda: SGD(0.9)),
    "nesterov": (OptimizerTraits("sgd", momentum=0.9, nesterov=True), lambda: SGD(0.9, nesterov=True)),
    "adam": (OptimizerTraits("adam"), Adam),
    "rmsprop": (OptimizerTraits("other"), RMSprop),
}
CASES = [(rule, optimizer) for rule in RULES for optimizer in OPTIMIZERS]
SCRIPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**32 - 1)), min_size=1, max_size=12)


def shard_of(rule, optimizer, dtype=np.float64, size=3):
    traits, make = OPTIMIZERS[optimizer]
    spec = resolve_algorithm("asgd", update_rule=rule)
    shard = SimulatedShard(make_rule(spec, traits), np.linspace(-1, 1, size).astype(dtype), make())
    for worker in range(3):
        shard.pull(worker)
    return shard


def gradient_of(seed, dtype=np.float64, size=3):
    return np.random.default_rng(seed).normal(size=size).astype(dtype)


def kinds(state):
    """Return shape and dtype of each array by its name."""
    return {name: (np.shape(value), np.asarray(value).dtype) for name, value in state.items()}


def test_every_rule_of_the_preset_axis_exists():
    assert set(RULES) == set(AXES["update_rule"])


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_no_delay_equals_the_optimizer_alone(rule, optimizer):
    shard = shard_of(rule, optimizer)
    alone, weights = OPTIMIZERS[optimizer][1](), shard.weights
    for step in range(25):
        shard.push(0, gradient_of(step), 0.1 / (1 + step))
        if step == 0:
            shard.pull(0)
        weights = alone(weights, gradient_of(step), 0.1 / (1 + step))
        assert shard.weights == pytest.approx(weights, abs=1e-12)
        assert shard.backup(0) == pytest.approx(weights, abs=1e-12)


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_a_rule_declares_whether_it_reads_the_backup(rule, optimizer):
    shards = [shard_of(rule, optimizer) for _ in range(2)]
    shards[1]._backups[0] = shards[1]._backups[0] + 1.0
    for shard in shards:
        shard.push(0, gradient_of(1), 0.1)  # creates the mean of squared steps
        shard._backups[0] = shard._backups[0] + (shard is shards[1])
        shard.push(0, gradient_of(2), 0.1)
    differs = not np.array_equal(shards[0].weights, shards[1].weights)
    assert differs == shards[0].rule.uses_backup


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_a_rule_keeps_as_many_vectors_as_estimates_of_memory_count(rule, optimizer):
    facts, weights = RULE_FACTS[rule], np.zeros(1600, np.float32)
    made = make_rule(
        resolve_algorithm("asgd", update_rule=rule), OPTIMIZERS[optimizer][0], KernelBlocks([(1600,)], [False])
    )
    state, of_worker = made.init_shard(np, weights), made.init_worker(np, weights)
    owned = sum(np.size(state.pop(name, ())) for name in ("reserve", "second_moment"))
    assert bool(owned) == (facts.reserve and optimizer != "rmsprop")
    assert sum(map(np.size, state.values())) <= facts.state * weights.size + 10  # and a few numbers
    assert sum(map(np.size, of_worker.values())) == facts.worker_state * weights.size
    assert made.uses_backup == facts.backups


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
@given(script=SCRIPTS)
def test_the_dtype_and_shapes_of_weights_and_state_never_change(rule, optimizer, script):
    shard = shard_of(rule, optimizer, np.float32)
    corrections, correct = [], shard.rule.correct
    shard.rule.correct = lambda *args: corrections.append(correct(*args)) or corrections[-1]
    before, of_worker = kinds(shard.state), kinds(shard._workers[0])
    assert {*before.values(), *of_worker.values()} <= {((3,), np.dtype("f4")), ((), np.dtype("f4"))}
    for worker, seed in script:
        received = shard.push(worker, gradient_of(seed, np.float32), 0.1)
        assert received.dtype == shard.weights.dtype == shard.last_gradient.dtype == np.float32
        assert np.asarray(corrections[-1].learning_rate_scale).dtype == np.float32
        assert kinds(shard.state) == before
        assert kinds(shard._workers[worker]) == of_worker


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
@given(script=SCRIPTS)
def test_nothing_is_written_in_place(rule, optimizer, script):
    shard = shard_of(rule, optimizer)
    for worker, seed in script:
        held = [shard.weights, shard.backup(worker), *(np.asarray(v) for v in shard.state.values())]
        copies = [a.copy() for a in held]
        shard.push(worker, gradient_of(seed), 0.1)
        assert all(np.array_equal(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
@given(script=SCRIPTS)
def test_the_same_pushes_give_the_same_weights_under_other_names(rule, optimizer, script):
    one, two = shard_of(rule, optimizer), shard_of(rule, optimizer)
    for worker, seed in script:
        one.push(worker, gradient_of(seed), 0.1)
        two.push(2 - worker, gradient_of(seed), 0.1)
        assert np.array_equal(one.weights, two.weights)


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
@given(script=SCRIPTS)
def test_elements_do_not_see_each_other(rule, optimizer, script):
    whole, part = shard_of(rule, optimizer), shard_of(rule, optimizer)
    part.weights = part.weights[:1]
    part.state = part.rule.init_shard(np, part.weights)
    part._workers = {}
    for worker in range(3):
        part.pull(worker)
    for worker, seed in script:
        whole.push(worker, gradient_of(seed), 0.1)
        part.push(worker, gradient_of(seed)[:1], 0.1)
        assert np.array_equal(whole.weights[:1], part.weights)


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_zero_gradients_from_the_start_move_nothing(rule, optimizer):
    shard = shard_of(rule, optimizer)
    for worker in (0, 1, 2, 1, 0):
        received = shard.push(worker, np.zeros(3), 0.1)
        assert np.array_equal(shard.weights, np.linspace(-1, 1, 3))
        assert np.array_equal(received, shard.weights)
