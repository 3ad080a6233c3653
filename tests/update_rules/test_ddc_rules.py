"""DDC-ASGD: its limiting cases, its invariants, and export and import of its state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from tests.support.reference_optimizers import SGD, Adam, RMSprop
from tests.support.simulated_shard import SimulatedShard

MOMENTA = [(0.0, False), (0.0, True), (0.5, False), (0.9, False), (0.9, True), (0.99, True)]
RATES = [0.1, 0.1, 0.05, 0.2, 0.01, 0.1, 0.3, 0.0, 0.1, 0.1] * 3


def ddc(traits, **overrides):
    return make_rule(resolve_algorithm("ddc-asgd", **overrides), traits)


def sgd(momentum=0.9, nesterov=False):
    return OptimizerTraits("sgd", momentum=momentum, nesterov=nesterov)


def gradients(count, size=4, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size))


def trained_alone(rule, rates, **options):
    shard = SimulatedShard(rule, np.linspace(-1, 1, 4), **options)
    shard.pull("a")
    for gradient, rate in zip(gradients(len(rates)), rates, strict=True):
        shard.push("a", gradient, rate)
    return shard


def reference(optimizer, rates):
    weights = np.linspace(-1, 1, 4)
    for gradient, rate in zip(gradients(len(rates)), rates, strict=True):
        weights = optimizer(weights, gradient, rate)
    return weights


@pytest.mark.parametrize(("momentum", "nesterov"), MOMENTA)
def test_without_delay_it_is_keras_sgd_under_any_schedule(momentum, nesterov):
    optimizer = SGD(momentum, nesterov)
    shard = trained_alone(ddc(sgd(momentum, nesterov)), RATES)
    assert shard.weights == pytest.approx(reference(optimizer, RATES), abs=1e-12)
    if momentum:
        assert shard.leave()["momentum"] == pytest.approx(optimizer.velocity, abs=1e-12)


def test_without_delay_the_reserve_is_the_velocity_in_units_of_what_it_will_still_do():
    optimizer = SGD(0.9)
    shard = trained_alone(ddc(sgd(0.9)), RATES)
    reference(optimizer, RATES)
    assert shard.state["reserve"] == pytest.approx(-0.9 * optimizer.velocity / 0.1, abs=1e-12)


@pytest.mark.parametrize(
    "traits", [OptimizerTraits("adam"), OptimizerTraits("adam", beta_1=0.5, beta_2=0.9, epsilon=0.1)]
)
def test_without_delay_it_is_keras_adam_under_any_schedule(traits):
    optimizer = Adam(traits.beta_1, traits.beta_2, traits.epsilon)
    shard = trained_alone(ddc(traits), RATES)
    assert shard.weights == pytest.approx(reference(optimizer, RATES), abs=1e-12)
    assert shard.leave()["m"] == pytest.approx(optimizer.m, abs=1e-12)
    assert shard.leave()["v"] == pytest.approx(optimizer.v, abs=1e-12)


def test_without_delay_any_other_optimizer_runs_as_it_is():
    shard = trained_alone(ddc(OptimizerTraits("other")), RATES, optimizer=RMSprop())
    assert np.array_equal(shard.weights, reference(RMSprop(), RATES))


@pytest.mark.parametrize(
    ("traits", "make"),
    [(sgd(0.9), lambda: SGD(0.9)), (sgd(0.9, True), lambda: SGD(0.9, True)), (OptimizerTraits("adam"), Adam)],
    ids=["momentum", "nesterov", "adam"],
)
def test_a_warm_start_continues_the_users_optimizer(traits, make):
    optimizer, weights = make(), np.linspace(-1, 1, 4)
    for gradient in gradients(7, seed=1):
        weights = optimizer(weights, gradient, 0.1)
    shard = SimulatedShard(ddc(traits), weights, updates=7)
    slots = {"momentum": optimizer.velocity} if traits.kind == "sgd" else {"m": optimizer.m, "v": optimizer.v}
    shard.enter(**slots)
    for name, value in slots.items():
        assert shard.leave()[name] == pytest.approx(value, abs=1e-12)
    shard.pull("a")
    for gradient in gradients(7, seed=2):
        weights = optimizer(weights, gradient, 0.05)
        shard.push("a", gradient, 0.05)
    assert shard.weights == pytest.approx(weights, abs=1e-12)


def test_a_warm_start_is_where_a_shard_stands_that_has_trained_so_far():
    traits, optimizer = OptimizerTraits("adam"), Adam()
    own = trained_alone(ddc(traits), RATES[:7])
    warm = SimulatedShard(ddc(traits), reference(optimizer, RATES[:7]), updates=7)
    warm.enter(m=optimizer.m, v=optimizer.v)
    for name in ("reserve", "second_moment", "reserve_bias", "scale"):
        assert warm.state[name] == pytest.approx(own.state[name], abs=1e-12)


def test_entering_untouched_slots_is_a_cold_start():
    warm = SimulatedShard(ddc(OptimizerTraits("adam")), np.zeros(2))
    warm.enter(m=np.zeros(2), v=np.zeros(2))
    for name, value in SimulatedShard(ddc(OptimizerTraits("adam")), np.zeros(2)).state.items():
        assert np.array_equal(warm.state[name], value)


def interleaved(rule, script, weights=None, rate=0.1, names=None):
    """Push the gradients of ``script`` ((worker, gradient), ...) after all workers have pulled."""
    shard = SimulatedShard(rule, np.linspace(-1, 1, 4) if weights is None else weights)
    names = names or {w: w for w, _ in script}
    for worker in sorted({names[w] for w, _ in script}, key=str):
        shard.pull(worker)
    for worker, gradient in script:
        yield shard, shard.push(names[worker], gradient, rate)


SCRIPTS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.floats(-5, 5), min_size=4, max_size=4).map(np.array)),
    min_size=1,
    max_size=25,
)


@given(SCRIPTS, st.sampled_from([(0.5, False), (0.9, False), (0.9, True)]))
def test_every_gradient_moves_the_weights_by_its_share_in_all(script, kind):
    # for any tbar: delivered + still in reserve = lr * sum(gc) / (1 - mu)
    momentum, nesterov = kind
    total = np.zeros(4)
    for shard, _ in interleaved(ddc(sgd(momentum, nesterov)), script):
        total = total + 0.1 * shard.last_gradient / (1 - momentum)
        delivered = np.linspace(-1, 1, 4) - shard.weights
        assert delivered + shard.state["reserve"] == pytest.approx(total, rel=1e-9, abs=1e-9)


@given(SCRIPTS)
def test_without_momentum_the_reserve_stays_empty_and_no_slot_is_returned(script):
    for shard, received in interleaved(ddc(sgd(0.0)), script):
        assert not shard.state["reserve"].any()
        assert np.array_equal(received, shard.weights)
        assert shard.leave() == {}


@given(SCRIPTS)
def test_with_nothing_switched_on_it_is_plain_asgd_bit_for_bit(script):
    off = ddc(sgd(0.0), dc_lambda=0.0, gap=0.0)
    plain = make_rule(resolve_algorithm("asgd"), sgd(0.0))
    pairs = zip(interleaved(off, script), interleaved(plain, script), strict=True)
    for (shard, received), (other, expected) in pairs:
        assert np.array_equal(received, expected)
        assert np.array_equal(shard.weights, other.weights)


ALL = [sgd(0.9), sgd(0.9, True), OptimizerTraits("adam"), OptimizerTraits("other")]


@pytest.mark.parametrize("traits", ALL, ids=lambda t: f"{t.kind}{'-nesterov' if t.nesterov else ''}")
@given(script=SCRIPTS, clip=st.floats(0.1, 3))
def test_the_compensated_gradient_is_bounded(traits, script, clip):
    pushes = interleaved(ddc(traits, dc_clip=clip), script)
    for (_, gradient), (shard, _) in zip(script, pushes, strict=True):
        assert (np.abs(shard.last_gradient) <= (1 + clip) * np.abs(gradient) * (1 + 1e-12)).all()


@pytest.mark.parametrize("traits", ALL, ids=lambda t: f"{t.kind}{'-nesterov' if t.nesterov else ''}")
@given(script=SCRIPTS)
def test_renaming_workers_changes_nothing(traits, script):
    names = {0: "z", 1: "y", 2: "x", 3: "w"}
    ours = interleaved(ddc(traits), script)
    renamed = interleaved(ddc(traits), script, names=names)
    for (_, a), (_, b) in zip(ours, renamed, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("traits", ALL, ids=lambda t: f"{t.kind}{'-nesterov' if t.nesterov else ''}")
@given(script=SCRIPTS, cut=st.integers(1, 3))
def test_two_shards_equal_one_bit_for_bit(traits, script, cut):
    whole = interleaved(ddc(traits), script)
    start = np.linspace(-1, 1, 4)
    left = interleaved(ddc(traits), [(w, g[:cut]) for w, g in script], start[:cut])
    right = interleaved(ddc(traits), [(w, g[cut:]) for w, g in script], start[cut:])
    for (_, one), (_, a), (_, b) in zip(whole, left, right, strict=True):
        assert np.array_equal(one, np.concatenate([a, b]))


def test_no_drift_leaves_the_gradient_alone_whatever_the_delay():
    shard = SimulatedShard(ddc(sgd(0.9)), np.ones(2))
    for worker in "ab":
        shard.pull(worker)
    for _ in range(3):
        shard.push("b", np.zeros(2), 0.1)
    shard.push("a", np.array([3.0, -2.0]), 0.1)
    assert shard.last_staleness == 3
    assert np.array_equal(shard.last_gradient, [3.0, -2.0])


def test_the_mean_delay_follows_quickly_at_first_and_slowly_later():
    rule = ddc(sgd(0.9))
    shard = SimulatedShard(rule, np.zeros(1))
    shard.pull("a")
    shard.pull("b")
    shard.push("a", np.ones(1), 0.1)
    expected = 0.0
    for update in range(1, 60):
        shard.push("b" if update % 2 else "a", np.ones(1), 0.1)
        decay = 0.9 if update <= 49 else 0.99
        expected = decay * expected + (1 - decay) * shard.last_staleness
        assert shard.state["mean_delay"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True)])
def test_the_look_ahead_is_what_the_reserve_releases_in_tau_updates(momentum, nesterov):
    rule = ddc(sgd(momentum, nesterov))
    shard = SimulatedShard(rule, np.array([1.0]))
    for worker in range(4):
        shard.pull(worker)
    for worker in range(4):
        received = shard.push(worker, np.array([1.0]), 0.1)
    tau, delay = shard.last_staleness, float(shard.state["mean_delay"])
    state, weights = shard.state, shard.weights
    for _ in range(tau):  # only the reserve is delivered, at the present mean delay
        advance = rule.advance(
            np, np.zeros(1), weights, np.asarray(0.1), np.asarray(0.0), {**state, "mean_delay": delay}
        )
        weights, state = advance.weights, advance.shard
    assert tau == 3
    assert received == pytest.approx(weights, abs=1e-12)


def test_the_adam_look_ahead_uses_the_scale_of_the_last_update():
    shard = SimulatedShard(ddc(OptimizerTraits("adam")), np.array([1.0]))
    for worker in range(3):
        shard.pull(worker)
    for worker in range(3):
        received = shard.push(worker, np.array([1.0]), 0.01)
    state = shard.state
    kept = 0.9 ** (1 / (1 + state["mean_delay"]))
    unit = (np.sqrt(state["second_moment"]) + 1e-7) * state["scale"]
    assert received == pytest.approx(shard.weights - 0.01 * (1 - kept**2) * state["reserve"] / unit, abs=1e-12)


@pytest.mark.parametrize("traits", ALL)
def test_the_options_and_their_defaults(traits):
    made = ddc(traits).reliability
    assert (made.dc_lambda, made.dc_clip, made.gap) == (0.2, 1.0, 1.0)
    made = ddc(traits, dc_lambda=0.5, dc_clip=2, gap=0).reliability
    assert (made.dc_lambda, made.dc_clip, made.gap) == (0.5, 2.0, 0.0)


def test_optimizers_it_cannot_take_over_are_black_boxes():
    assert not ddc(OptimizerTraits("adam", beta_1=0.0)).owns_optimizer
    assert not ddc(OptimizerTraits("adam", beta_1=1.0)).owns_optimizer
    assert not ddc(OptimizerTraits("sgd", momentum=1.0)).owns_optimizer
    assert not ddc(OptimizerTraits("other")).owns_optimizer
    assert ddc(OptimizerTraits("adam")).owns_optimizer
