"""Promise of every update rule, consistency and preset: a shard that starts from a copy goes on like the original."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import AXES, PRESETS
from nfdt.model.program.state import State
from nfdt.shard.sparse_store import SparseStore
from nfdt.update_rules import RULES
from tests.support.restored_stores import Shards, check_continuation
from tests.support.shard_cluster import LAYOUT, Reference

pytestmark = pytest.mark.processes

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
}
MANY = tuple("abcdef")
TABLE = ParameterLayout.of([("kernel", (4, 2)), ("table", (1024, 64)), ("bias", (2,))])


def shards_of(preset, optimizer="momentum", workers=3, **options):
    algorithm = resolve_algorithm(preset, **options)
    # Where workers step, shards subtract the difference.
    reference = Reference(keras.optimizers.SGD(1.0) if algorithm.exchange_facts.local else OPTIMIZERS[optimizer]())
    state = State(reference.weights, reference.state)
    return Shards(reference.manifest(), state, algorithm, workers=workers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_on_from_a_copy(rule, optimizer):
    check_continuation(shards_of("asgd", optimizer, update_rule=rule))


@pytest.mark.parametrize("consistency", AXES["consistency"])
@pytest.mark.parametrize("rule", ["plain", "dc-a", "ddc"])
def test_every_consistency_goes_on_from_a_copy(consistency, rule):
    check_continuation(shards_of("asgd", update_rule=rule, consistency=consistency))


@pytest.mark.long
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_goes_on_from_a_copy(preset):
    check_continuation(shards_of(preset, "adamw"))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_on_from_a_copy_with_many_workers(rule):
    """Case: enough workers for backups that are differences to an anchor."""
    check_continuation(shards_of("asgd", update_rule=rule, workers=len(MANY)), after=40, workers=MANY)


@pytest.mark.parametrize(
    ("optimizer", "consistency"),
    [(keras.optimizers.SGD, "bsp"), (keras.optimizers.Adagrad, "free"), (keras.optimizers.Adam, "free")],
)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_on_from_a_copy_of_tables(rule, optimizer, consistency):
    reference = Reference(optimizer(0.1), layout=TABLE)
    manifest, state = reference.manifest().replaced(tables=[1]), State(reference.weights)
    algorithm = resolve_algorithm("asgd", update_rule=rule, consistency=consistency, sparse="lazy")
    shards = Shards(manifest, state, algorithm)
    assert isinstance(shards.stores[0], SparseStore)
    check_continuation(shards)


def test_all_variables_of_the_small_program_are_copied():
    assert sum(store.size for store in shards_of("asgd").stores) == LAYOUT.size
