"""Copies of a shard, and shards that start from them."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.core.sharding.records import (
    closed_round_of,
    join_records,
    part_of_records,
    to_arrays,
    to_tree,
)
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.state import State, load_state
from nfdt.shard.sparse_store import SparseStore
from tests.support.restored_stores import Shards, check_continuation, same, train
from tests.support.shard_cluster import Reference, gradients

WITH_TABLE = ParameterLayout.of([("kernel", (4, 2)), ("table", (1024, 64)), ("bias", (2,))])


def shards_of(preset="ddc-asgd", optimizer=None, shards=1, **options):
    reference = Reference(optimizer or keras.optimizers.SGD(0.1, momentum=0.9))
    state = State(reference.weights, reference.state)
    return Shards(reference.manifest(), state, resolve_algorithm(preset, **options), shards=shards)


def with_table(rule, **options):
    reference = Reference(keras.optimizers.SGD(0.1), layout=WITH_TABLE)
    manifest = reference.manifest().replaced(tables=[1])
    made = Shards(manifest, State(reference.weights), resolve_algorithm("asgd", update_rule=rule, **options))
    assert isinstance(made.stores[0], SparseStore)
    return made


def rows_pushed(shards, worker, rows):
    """Push a gradient with these rows of the table; return the reply's weights."""
    flat = np.zeros(WITH_TABLE.size, np.float32)
    table = flat[8 : 8 + 1024 * 64].reshape(1024, 64)
    table[rows] = np.random.default_rng(len(rows)).normal(size=(len(rows), 64))
    flat[:8] = 1.0
    return shards.push(worker, flat)


# -- names


def test_a_tree_has_the_same_leaves_after_its_way_through_arrays():
    tree = {"version": 3, "workers": {"a/b ü": {"rule": {"x": 7}}, "": {"rule": {"x": 0}}}}
    arrays = to_arrays({**tree, "mode": {}})
    assert sorted(arrays) == ["version", "workers//rule/x", "workers/a%2Fb%20%C3%BC/rule/x"]
    assert to_tree(arrays) == tree
    assert closed_round_of(arrays) == 0
    assert closed_round_of({"mode/closed_round": np.array(4)}) == 4


def test_the_records_of_all_shards_have_names_that_begin_with_their_index():
    parts = [{"version": np.array(index), "rule/x": np.array(index)} for index in range(11)]
    joined = join_records(parts)
    assert [part_of_records(joined, index) for index in range(11)] == parts
    with pytest.raises(ProtocolError, match="expected those of shard 2. Received: those of 0, 1"):
        part_of_records(join_records(parts[:2]), 2)


# -- restored stores


def test_shards_that_were_copied_after_different_numbers_of_pushes_go_on():
    """Case: Adam's step depends on the number of updates, of which each shard has its own."""
    shards = shards_of("asgd", keras.optimizers.Adam(0.01), shards=2)
    shards.pull("a")
    shards.push("a", gradients(1)[0])
    shards.push("a", gradients(2)[1], only=1)
    assert [store.version for store in shards.stores] == [1, 2]
    restored = check_continuation(shards)
    assert len(restored.stores) == 2


def test_workers_start_again_with_their_rule_state_and_sequence_0():
    shards = shards_of("dc-asgd-a")
    train(shards, 7, 1)
    state, records = shards.snapshot()
    restored = shards.restored(state, records)
    with pytest.raises(ProtocolError, match="a pull before"):
        restored.push("a", gradients(1)[0])
    restored.sequences.clear()
    restored.pull("a")
    assert restored.push("a", gradients(1)[0])[0][-1], "applied"


def test_a_copy_of_a_restored_store_equals_the_first_copy():
    """Case: records of workers that have not come back are kept, until they are forgotten."""
    shards = shards_of("dc-asgd-a")
    train(shards, 7, 1)
    first = shards.snapshot()
    restored = shards.restored(*first)
    restored.pull("a")
    second = restored.snapshot()
    one, other = (load_arrays(records) for _, records in (first, second))
    assert sorted(one) == sorted(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    same([load_state(second[0]).weights], [load_state(first[0]).weights])
    restored.stores[0].forget("a")
    restored.stores[0].forget("b")
    assert list(restored.stores[0].hold(records=True).copied().records["workers"]) == ["c/1"]


@pytest.mark.parametrize("made", [shards_of, lambda: shards_of("n-softsync"), lambda: with_table("plain")])
def test_a_task_is_applied_once_by_whatever_worker_and_also_after_a_return_to_a_copy(made):
    shards = made()
    size = sum(store.size for store in shards.stores)
    gradient = np.ones(size, np.float32)
    for worker in "ab":
        shards.pull(worker)
    assert shards.push("a", gradient, tasks=[3])[0][-1], "applied"
    assert not shards.push("b", gradient, tasks=[3])[0][-1]
    assert shards.stores[0].forget("a", [2, 3, 4]) == [3]
    again = shards.restored(*shards.snapshot())
    for incarnation in (shards, again):
        incarnation.pull("c")
        before = incarnation.read().weights
        reply, _, _, applied = incarnation.push("c", gradient, tasks=[3])[0]
        assert not applied
        np.testing.assert_array_equal(reply, before)
        np.testing.assert_array_equal(incarnation.read().weights, before)
        assert incarnation.push("c", gradient, tasks=[4])[0][-1]
        assert incarnation.push("c", gradient, tasks=[4, 5])[0][-1], "a part of it is new"


@pytest.mark.parametrize("made", [lambda: shards_of("bsp", update_rule="dc-a"), lambda: with_table("dc-a")])
def test_the_rules_state_of_rounds_and_rows_is_kept_whole(made):
    """Case: the weights after the next pushes do not depend on all of it."""
    shards = made()
    train(shards, 4, 1)
    first = shards.snapshot()
    second = shards.restored(*first).snapshot()
    one, other = (to_tree(load_arrays(records))["0"] for _, records in (first, second))
    assert "rule" in one.get("mode", {}) or "rule" in one["workers"]["a"]
    for tree in (one, other):
        tree["workers"] = {worker: own["rule"] for worker, own in tree.get("workers", {}).items()}
    assert sorted(to_arrays(one)) == sorted(to_arrays(other))
    assert all(np.array_equal(array, to_arrays(other)[name]) for name, array in to_arrays(one).items())


def test_gradients_that_wait_for_others_are_in_the_copy():
    shards = shards_of("n-softsync", softsync_n=1)
    train(shards, 2, 1)
    restored = shards.restored(*shards.snapshot())
    for made in (shards, restored):
        assert made.stores[0].version == 0
        assert made.stores[0].flush() == 1
    same([restored.read().weights], [shards.read().weights])


def test_the_open_round_is_left_out_and_pushed_again():
    shards, clean = shards_of("bsp"), shards_of("bsp")
    for made in (shards, clean):
        train(made, 2, 1)
    g = gradients(2)
    shards.push("a", g[0], round=3, part=0, parts=2)
    state, records = shards.snapshot()
    restored = shards.restored(state, records)
    assert closed_round_of(part_of_records(load_arrays(records), 0)) == restored.stores[0].closed_round == 2
    for made in (restored, clean):
        made.pull("a"), made.pull("b")
        made.push("b", g[1], round=3, part=1, parts=2)
        made.push("b", g[0], round=3, part=0, parts=2)
    same([restored.read().weights], [clean.read().weights])


def test_a_copy_does_not_change_with_its_store():
    for shards in (shards_of("dc-asgd-a"), with_table("dc-a")):
        train(shards, 3, 1)
        copy = shards.stores[0].hold(records=True).copied()
        before = [copy.weights.copy(), *(array.copy() for array in to_arrays(copy.records).values())]
        train(shards, 7, 2)
        same([copy.weights, *to_arrays(copy.records).values()], before)


@pytest.mark.parametrize("rule", ["plain", "ddc", "dc-a"])
def test_single_rows_go_on_from_a_copy(rule):
    shards = with_table(rule)
    for worker in "ab":
        shards.pull(worker)
    rows_pushed(shards, "a", [1, 2, 3]), rows_pushed(shards, "b", [2, 5, 9])
    restored = shards.restored(*shards.snapshot())
    found = []
    for made in (shards, restored):
        replies = [made.pull("a"), made.pull("b")]
        replies += [rows_pushed(made, "a", [2, 5]), rows_pushed(made, "b", [1, 5, 7]), rows_pushed(made, "b", [5])]
        found.append(replies)
    same(*found)


def test_delayed_pushes_that_overlap_go_on_from_a_copy():
    check_continuation(shards_of("ddc-asgd", overlap=1))


@pytest.mark.parametrize("made", [lambda: shards_of("ddc-asgd"), lambda: with_table("ddc")], ids=["dense", "tables"])
def test_records_of_another_rule_are_refused(made):
    shards = made()
    train(shards, 2, 1)
    state, records = shards.snapshot()
    other = {name: array for name, array in load_arrays(records).items() if "/rule/" not in name}
    manifest, algorithm = shards._made
    with pytest.raises(ShapeMismatch, match="another job"):
        Shards(manifest, load_state(state), algorithm, records=other)
