"""Equality of a shard with one worker (no delay) and the user's Keras optimizer, step by step."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import UsageError
from nfdt.core.sharding import make_plan
from nfdt.update_rules import RULES
from tests.support.shard_cluster import LAYOUT, Cluster, Reference, gradients, start_weights

pytestmark = pytest.mark.processes

Schedule = keras.optimizers.schedules.ExponentialDecay
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}
OTHERS = {
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.5),
}
WHOLE = {
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "schedule free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
}
OPTIONS = {
    "schedule": lambda: keras.optimizers.SGD(Schedule(0.1, 2, 0.5), momentum=0.9),
    "adam schedule": lambda: keras.optimizers.Adam(Schedule(0.1, 2, 0.5)),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.2),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "decay": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8),
    "ema overwrite": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "loss scale": lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=1.0),
}


LARGE = ParameterLayout.of([("table", (300, 64)), ("kernel", (64, 10)), ("bias", (10,))])


def same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


def check_steps(reference, cluster, steps=5):
    same(cluster.pull(), reference.weights)
    for gradient in gradients(steps, layout=reference.layout):
        reference.apply(gradient)
        replies = cluster.push(gradient)
        same(np.concatenate([r.weights for r in replies]), reference.weights)
        same(cluster.weights, reference.weights)
    wanted, found = reference.state, cluster.state
    assert sorted(found) == sorted(wanted)
    for index in wanted:
        assert found[index].shape == wanted[index].shape
        same(found[index], wanted[index])


# Only ddc has code for a specific optimizer: the other rules compute a gradient and a rate for any optimizer.
RULES_AND_OPTIMIZERS = [
    (rule, name) for rule in RULES for name in OPTIMIZERS if rule == "ddc" or name in ("momentum", "adam")
]


@pytest.mark.feature("SGD with momentum and Nesterov, Adam, AdamW", area="Optimizers")
@pytest.mark.parametrize(("rule", "name"), RULES_AND_OPTIMIZERS)
def test_no_delay_equals_the_optimizer_alone(rule, name):
    reference = Reference(OPTIMIZERS[name]())
    check_steps(reference, Cluster(reference, rule=rule))


@pytest.mark.parametrize(("rule", "name"), [("plain", "momentum"), *(("ddc", name) for name in OPTIMIZERS)])
def test_three_shards_equal_the_optimizer_alone(rule, name):
    reference = Reference(OPTIMIZERS[name]())
    check_steps(reference, Cluster(reference, rule=rule, shards=3))


@pytest.mark.feature("RMSprop, Adagrad, Lion, Nadam, AMSGrad", "Gradient accumulation", area="Optimizers")
@pytest.mark.parametrize(("name", "rule"), list(zip(OTHERS, itertools.cycle(["plain", "ddc"]))))
def test_any_optimizer_keeps_its_meaning(rule, name):
    reference = Reference(OTHERS[name]())
    check_steps(reference, Cluster(reference, rule=rule, shards=2))


@pytest.mark.feature("Adafactor, Lamb, Muon, ScheduleFreeAdamW", area="Optimizers")
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_whole_variables_is_cut_between_them(name):
    reference = Reference(WHOLE[name]())
    assert not any(make_plan(reference.manifest(), index, 3).flat for index in range(3))
    check_steps(reference, Cluster(reference, rule="plain", shards=3))


@pytest.mark.parametrize(
    ("rule", "name"), [("plain", "ema"), ("dc-a", "rmsprop"), ("ddc", "momentum"), ("ddc", "adamw")]
)
def test_a_large_variable_is_cut_and_trained_the_same(rule, name):
    reference = Reference({**OPTIMIZERS, **OTHERS, **OPTIONS}[name](), layout=LARGE)
    reference.apply(gradients(1, seed=7, layout=LARGE)[0])
    cluster = Cluster(reference, rule=rule, shards=3, warm=True)
    assert [store.size for store in cluster.stores] == [6592, 6720, 6538]
    check_steps(reference, cluster, steps=3)


def test_no_variable_is_cut_whose_optimizer_looks_at_all_of_it():
    for made in (WHOLE["lamb"], OPTIONS["clipnorm"]):
        manifest = Reference(made(), layout=LARGE).manifest()
        assert [make_plan(manifest, index, 2).layout.size for index in range(2)] == [19200, 650]
        with pytest.raises(UsageError, match="does not treat elements alike"):
            make_plan(manifest.replaced(divisible=True), 0, 2)


@pytest.mark.feature(
    "`clipnorm`, `clipvalue`, weight decay",
    "EMA of weights (`use_ema`)",
    "Learning-rate schedules of Keras",
    area="Optimizers",
)
@pytest.mark.parametrize(("name", "rule"), list(zip(OPTIONS, itertools.cycle(["dc-a", "ddc"]))))
def test_the_optimizers_options_keep_their_meaning(rule, name):
    reference = Reference(OPTIONS[name]())
    check_steps(reference, Cluster(reference, rule=rule, shards=1 if "global" in name else 2))


@pytest.mark.feature("Variables excluded from weight decay", area="Optimizers")
@pytest.mark.parametrize("rule", ["plain", "ddc"])
def test_excluded_variables_do_not_decay(rule):
    reference = Reference(OPTIMIZERS["adamw"](), exclude=(1, 3))
    cluster = Cluster(reference, rule=rule, shards=2)
    check_steps(reference, cluster)


@pytest.mark.feature("Constraints of variables", area="Optimizers")
@pytest.mark.parametrize("rule", ["plain", "ddc"])
def test_constraints_hold_after_each_step(rule):
    limits = [keras.constraints.NonNeg(), None, keras.constraints.MaxNorm(0.5), None]
    reference = Reference(OPTIMIZERS["momentum"](), constraints=limits)
    check_steps(reference, Cluster(reference, rule=rule, shards=2))


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam"])
@pytest.mark.parametrize(("rule", "shards"), [("plain", 3), ("ddc", 1), ("ddc", 3)])
def test_a_warm_start_continues_where_keras_stood(rule, name, shards):
    reference = Reference(OPTIMIZERS[name]())
    for gradient in gradients(3, seed=7):
        reference.apply(gradient)
    check_steps(reference, Cluster(reference, rule=rule, shards=shards, warm=True))


@pytest.mark.feature("Optimizers of the script", area="Optimizers")
def test_a_users_own_optimizer_runs_on_the_shard():
    @keras.saving.register_keras_serializable("tests")
    class HalfStep(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, keras.ops.cast(learning_rate, "float32") * gradient / 2)

    reference = Reference(HalfStep(0.1))
    check_steps(reference, Cluster(reference, rule="ddc"))


def test_the_learning_rate_can_be_replaced():
    reference = Reference(OPTIMIZERS["momentum"]())
    cluster = Cluster(reference, rule="ddc")
    reference.optimizer.learning_rate = 0.3
    cluster.stores[0].set_learning_rate(0.3)
    check_steps(reference, cluster)


def test_a_schedule_cannot_be_replaced():
    cluster = Cluster(Reference(OPTIONS["schedule"]()))
    with pytest.raises(UsageError, match="schedule"):
        cluster.stores[0].set_learning_rate(0.1)


def test_weights_and_optimizer_can_be_written():
    reference = Reference(OPTIMIZERS["momentum"]())
    cluster = Cluster(reference, rule="ddc")
    cluster.pull()
    cluster.push(gradients(1)[0])
    cluster.stores[0].write(start_weights(), reference.state)
    check_steps(reference, cluster)


def test_elementwise_optimizers_run_on_one_flat_vector():
    assert make_plan(Reference(OPTIMIZERS["adam"]()).manifest(), 0, 2).flat
    assert not make_plan(Reference(OPTIONS["clipnorm"]()).manifest(), 0, 2).flat
    assert not make_plan(Reference(OPTIMIZERS["adamw"](), exclude=(1,)).manifest(), 0, 1).flat
    assert make_plan(Reference(OPTIMIZERS["adamw"](), exclude=(3,)).manifest(), 0, 2).flat


@pytest.mark.feature(
    "`global_clipnorm` with several shards", area="Optimizers", status="refused", note="use `shards=1`"
)
def test_what_needs_one_shard_is_refused_with_several():
    manifest = Reference(OPTIONS["global_clipnorm"]()).manifest()
    with pytest.raises(UsageError, match=r"global_clipnorm.*shards=1"):
        make_plan(manifest, 0, 2)
    opaque = Reference(OPTIMIZERS["adam"]()).manifest().replaced(optimizer_variables=None)
    with pytest.raises(UsageError, match=r"cannot be attributed.*shards=1"):
        make_plan(opaque, 0, 2)
    with pytest.raises(UsageError, match="expected an index below 4"):
        make_plan(Reference(OPTIMIZERS["adam"]()).manifest(), 4, 9)


def test_an_opaque_optimizer_runs_on_one_shard():
    reference = Reference(OPTIMIZERS["adam"]())
    manifest = reference.manifest().replaced(optimizer_variables=None)
    reference.manifest = lambda: manifest
    check_steps(reference, Cluster(reference, rule="ddc", warm=True))
    assert LAYOUT.size == 26


@pytest.mark.parametrize("rule", ["plain", "ddc"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_a_push_of_another_weight_moves_as_the_learning_rate_times_it_would(rule, name):
    reference = Reference(OPTIMIZERS[name]())
    cluster = Cluster(reference, rule=rule)
    cluster.pull()
    for gradient, rate in zip(gradients(4), (0.25, 1.0, 1.6, 0.5), strict=True):
        reference.optimizer.learning_rate = 0.1 * rate
        reference.apply(gradient)
        cluster.push(gradient, rate=rate)
        same(cluster.weights, reference.weights)
