"""Tables beside a dense store: the same updates as on a dense shard, and answers with the changed rows."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.codecs.sparse import ROWS
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.seeded_rows import BLOCK_ROWS, SeededRows
from nfdt.core.arrays.table_rows import TableLayout, encode_numbers
from nfdt.core.errors import ProtocolError, ShapeMismatch, UsageError
from nfdt.core.sharding import held_by_workers, sparse_tables, tables_on_shards
from nfdt.core.sharding.plan import sent_parts
from nfdt.core.sharding.records import to_arrays
from nfdt.model.program.manifest import MadeTable
from nfdt.model.program.row_updates import why_dense
from nfdt.model.program.state import State
from nfdt.shard.building import build_store
from nfdt.shard.messages import DeltaRequest, Gradient
from nfdt.shard.sparse_store import SparseStore
from nfdt.shard.table import RowLog
from nfdt.update_rules import RULES
from tests.support.restored_stores import Shards
from tests.support.shard_cluster import Reference, rule_spec

LAYOUT = ParameterLayout.of([("kernel", (4, 2)), ("table", (1024, 64)), ("bias", (2,))])
TABLES = TableLayout.of(LAYOUT, (1,))


OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1), "adagrad": lambda: keras.optimizers.Adagrad(0.1)}


def manifest(optimizer=None):
    made = Reference(optimizer or keras.optimizers.SGD(0.1), layout=LAYOUT)
    return made.manifest().replaced(tables=[1]), State(made.weights)


def stores(rule, overlap=0, optimizer="sgd", **options):
    program, state = manifest(OPTIMIZERS[optimizer]())
    made = [
        build_store(program, state, rule_spec(rule, sparse=sparse, overlap=overlap, **options), 0, 1, workers=2)
        for sparse in (False, True)
    ]
    assert isinstance(made[1], SparseStore)
    return made


def gradient(seed, rows=40):
    rng = np.random.default_rng(seed)
    flat = rng.normal(size=LAYOUT.size).astype(np.float32)
    untouched = np.setdiff1d(np.arange(1024), rng.choice(1024, rows, replace=False))
    TABLES.views(flat)[0][untouched] = 0
    return flat


def push(store, worker, sequence, values, **fields):
    return store.push(worker, Gradient(sequence, values, **fields))


def run(store, rows, overlap=0):
    """Run workers of different speeds, one of them late; return every answer of each."""
    found = [store.pull("a", sequence=1).weights, store.pull("b", sequence=1).weights]
    for step, (worker, sequence) in enumerate([("a", 2), ("a", 3), ("b", 2), ("a", 4), ("b", 3), ("b", 4), ("a", 5)]):
        on = max(1, sequence - 1 - overlap)
        found.append(push(store, worker, sequence, gradient(step, rows), computed_on=on, rate=0.5 + step / 10).weights)
    return found


def same_variables(found, wanted):
    assert sorted(found) == sorted(wanted)
    for index, value in wanted.items():
        assert np.shape(found[index]) == np.shape(value)
        np.testing.assert_allclose(found[index], value, rtol=2e-5, atol=2e-6)


def counts(store):
    return {name: value for name, value in store.statistics().items() if not name.endswith("_s")}


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_rows_are_moved_as_a_dense_shard_moves_them(rule, overlap, optimizer):
    """Case: all rows are touched if the rule keeps state, as state of untouched rows decays on a dense shard only."""
    rows = 40 if rule in ("plain", "staleness-scaled", "dc") else 1024
    dense, sparse = stores(rule, overlap, optimizer)
    for wanted, answer in zip(run(dense, rows, overlap), run(sparse, rows, overlap), strict=True):
        np.testing.assert_allclose(answer, wanted, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(sparse.read()[0], dense.read()[0], rtol=2e-5, atol=2e-6)
    same_variables(sparse.read()[1], dense.read()[1])
    assert sparse.version == dense.version == 7
    assert counts(sparse) == counts(dense)
    assert sparse.statistics()["busy_s"] > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_untouched_rows_stay_as_they_are(rule, optimizer):
    _, sparse = stores(rule, optimizer=optimizer)
    before = TABLES.views(sparse.pull("a").weights)[0]
    values = gradient(1)
    after = TABLES.views(push(sparse, "a", 1, values).weights)[0]
    changed = np.flatnonzero((before != after).any(1))
    assert changed.tolist() == np.flatnonzero(TABLES.views(values)[0].any(1)).tolist()


def test_an_answer_holds_the_rows_that_changed_since_the_one_the_worker_holds():
    _, store = stores("ddc")
    held = store.pull("a", sequence=1).weights.copy()
    store.pull("b", sequence=1)
    push(store, "b", 2, gradient(1))
    reply = store.push("a", Gradient(2, TABLES.encode(TABLES.touched(gradient(2)))), delta=DeltaRequest(ROWS, 1))
    assert reply.weights is None
    assert reply.delta.base == 1
    news = TABLES.decode(reply.delta.payload)
    assert 40 < news.rows[0].index.size <= 80
    table = TABLES.views(held)[0]
    table[news.rows[0].index] = news.rows[0].values
    assert np.array_equal(TABLES.join(news.dense, [table]), store.read()[0])


def test_what_is_not_known_any_more_is_answered_with_all_weights():
    _, store = stores("plain")
    store.pull("a", sequence=1)
    assert store.pull("a", sequence=2, delta=DeltaRequest(ROWS, 7)).delta is None
    assert store.pull("a", sequence=3, delta=DeltaRequest(ROWS, 2)).delta is not None
    assert store.pull("a", sequence=3, delta=DeltaRequest(ROWS, 2)).delta is None  # sent again
    store.write(np.ones(LAYOUT.size, np.float32), {})
    reply = store.pull("a", sequence=4, delta=DeltaRequest(ROWS, 3))
    assert np.array_equal(reply.weights, np.ones(LAYOUT.size))
    store.forget("a")
    with pytest.raises(ProtocolError, match="the job has given up"):
        store.pull("a", sequence=5, delta=DeltaRequest(ROWS, 4))


def test_a_push_is_applied_once_and_dropped_as_a_whole():
    _, store = stores("dc-a")
    store.pull("a", sequence=1)
    push(store, "a", 2, gradient(1))
    held = store.read()[0]
    assert not push(store, "a", 2, gradient(1)).applied
    infinite = gradient(2)
    TABLES.views(infinite)[0][np.flatnonzero(TABLES.views(infinite)[0].any(1))[0]] = np.inf
    assert not push(store, "a", 3, infinite).applied
    assert np.array_equal(store.read()[0], held)
    assert store.version == 1


def test_what_does_not_fit_is_refused():
    _, store = stores("plain")
    store.pull("a", sequence=1)
    with pytest.raises(ShapeMismatch, match="expected 65546 float32"):
        push(store, "a", 2, np.zeros(3, np.float32))
    with pytest.raises(ShapeMismatch, match="at least"):
        push(store, "a", 2, np.zeros(3, np.uint8))
    with pytest.raises(ProtocolError, match="a pull before"):
        push(store, "b", 1, gradient(1))
    with pytest.raises(ProtocolError, match="expected version 1"):
        store.pull("a", min_version=1, timeout_s=0.01)


@pytest.mark.parametrize("denominators", [(0, 0, 0), (3, 0.5, 1), (np.inf, np.inf, np.inf)])
@pytest.mark.parametrize(("rule", "optimizer"), [("plain", "sgd"), ("dc-a", "sgd"), ("ddc", "sgd"), ("ddc", "adagrad")])
def test_the_parts_of_a_round_are_one_update(rule, optimizer, denominators):
    """In any order of arrival; a part that is not finite, comes twice or comes late counts for nothing."""
    found = []
    for store in stores(rule, optimizer=optimizer, consistency="bsp"):
        for worker in "abc":
            store.pull(worker, sequence=1)
        arrivals = [("b", 2, 1, 7), ("a", 2, 0, 20), ("b", 2, 1, 7), ("c", 2, 2, 1)]
        for worker, sequence, part, samples in arrivals:
            values = gradient(part, 1024)
            if worker == "c":
                values[0] = np.nan
            fields = {"samples": samples, "denominator": denominators[part]}
            push(store, worker, sequence, values, round=1, part=part, parts=3, **fields)
        assert store.version == 1
        push(store, "c", 3, gradient(9, 1024), round=1, part=2, parts=3)
        push(store, "a", 3, gradient(4, 1024), round=2, part=0, parts=2)
        assert store.version == 1
        assert store.flush() == 2
        push(store, "b", 3, gradient(5, 1024), round=2, part=1, parts=2)
        found.append((store.version, store.read()[0]))
    assert found[0][0] == found[1][0] == 2
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-5, atol=2e-6)


ALONE = {**OPTIMIZERS, "lazy": lambda: keras.optimizers.Adam(0.1, epsilon=0.0)}


@pytest.mark.parametrize("optimizer", ALONE)
def test_a_shard_of_rows_alone_counts_updates_and_drops_what_is_not_finite(optimizer):
    program, state = manifest(ALONE[optimizer]())
    algorithm = rule_spec("ddc", sparse="lazy" if optimizer == "lazy" else True)
    middle = build_store(program, state, algorithm, 1, 3, workers=1)
    assert isinstance(middle, SparseStore)
    rows = TableLayout(middle.size, ()).dense(middle.pull("a").weights).size // 64
    assert middle.size == 64 * rows
    assert push(middle, "a", 1, np.ones(middle.size, np.float32)).applied
    assert not push(middle, "a", 2, np.full(middle.size, np.nan, np.float32)).applied
    weights, variables = middle.read()
    step = 0.1 / np.sqrt(1.1) if optimizer == "adagrad" else 0.1
    np.testing.assert_allclose(
        weights, state.weights[middle_start(program) :][: middle.size] - step, rtol=1e-5, atol=1e-6
    )
    assert int(variables[0]) == middle.version == 1
    filled = {"sgd": {}, "adagrad": {3: 1.1}, "lazy": {4: 0.1, 5: 0.001}}[optimizer]
    assert sorted(variables) == [0, 1, *filled]
    for index, value in filled.items():
        np.testing.assert_allclose(variables[index], np.full((rows, 64), value), rtol=1e-4)


def middle_start(program):
    return program.layout.cut(3)[1].start


MANY = np.arange(1024)
PARTS = [MANY, np.array([3, 5, 1000]), np.array([3, 700]), MANY[::2]]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("rule", ["plain", "dc-a", "ddc"])
def test_one_worker_s_lazy_adam_is_keras_adam_whose_other_rows_stand_still(rule, shards):
    reference = Reference(keras.optimizers.Adam(0.02, beta_2=0.9), layout=LAYOUT)
    made = Shards(
        reference.manifest().replaced(tables=[1]),
        State(reference.weights, reference.state),
        rule_spec(rule, sparse="lazy"),
        shards=shards,
    )
    assert any(isinstance(store, SparseStore) for store in made.stores)
    made.pull("a")
    held = [reference.variables[1], *reference.optimizer.variables[4:6]]
    for step, rows in enumerate(PARTS):
        values = gradient(step, 1024)
        rest = np.setdiff1d(MANY, rows)
        TABLES.views(values)[0][rest] = 0
        before = [variable.numpy() for variable in held]
        reference.apply(values)
        for variable, kept in zip(held, before, strict=True):
            variable.assign(np.where(np.isin(MANY, rest)[:, None], kept, variable))
        made.push("a", values)
        state = made.read()
        np.testing.assert_allclose(state.weights, reference.weights, rtol=2e-4, atol=2e-6)
        same_variables(state.optimizer, reference.state)


@pytest.mark.parametrize("shards", [1, 2])
def test_adagrad_takes_over_and_writes_the_sums_of_a_table(shards):
    reference = Reference(keras.optimizers.Adagrad(0.1), layout=LAYOUT)
    for step in range(2):
        reference.apply(gradient(step))
    made = Shards(
        reference.manifest().replaced(tables=[1]), State(reference.weights, reference.state), rule_spec("ddc"),
        shards=shards,
    )  # fmt: skip
    same_variables(made.read().optimizer, reference.state)
    made.pull("a")
    for step in range(2, 4):
        reference.apply(gradient(step))
        made.push("a", gradient(step))
    np.testing.assert_allclose(made.read().weights, reference.weights, rtol=2e-5, atol=2e-6)
    same_variables(made.read().optimizer, reference.state)
    others = {index: np.asarray(value + 1, value.dtype) for index, value in reference.state.items()}
    for store, run in zip(made.stores, manifest()[0].layout.cut(shards), strict=True):
        store.write(reference.weights[run.elements], others)
    same_variables(made.read().optimizer, others)
    with pytest.raises(ShapeMismatch, match="another program"):
        made.stores[-1].write(reference.weights[-made.stores[-1].size :], {3: np.zeros((2, 64))})


OPTIONS = [
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"clipnorm": 1.0},
    {"clipvalue": 1.0},
    {"global_clipnorm": 1.0},
    {"use_ema": True},
    {"gradient_accumulation_steps": 2},
]


def test_only_what_plain_gradient_descent_moves_goes_by_rows():
    algorithm = rule_spec("ddc")
    assert sparse_tables(manifest()[0], algorithm, 1) == (1,)
    assert sparse_tables(manifest()[0], algorithm, 3) == (1,)
    for options in OPTIONS:
        assert not sparse_tables(manifest(keras.optimizers.SGD(0.1, **options))[0], algorithm, 1), options
    assert sparse_tables(manifest(keras.optimizers.Adagrad())[0], algorithm, 3) == (1,)
    assert not sparse_tables(manifest(keras.optimizers.Adam())[0], algorithm, 1)
    assert not sparse_tables(manifest()[0].replaced(optimizer_attributes={"momentum": 0.9}), algorithm, 1)
    assert not sparse_tables(manifest()[0].replaced(versions={"keras": "3", "jax": "0.4"}), algorithm, 1)
    for changed in ({"sparse": False}, {"codec": "int8"}, {"consistency": "softsync"}, {"topology": "groups"}):
        assert not sparse_tables(manifest()[0], algorithm.model_copy(update=changed), 1), changed
    assert not sparse_tables(manifest()[0].replaced(tables=[]), algorithm, 1)


LAZY = {
    "Adam": (keras.optimizers.Adam(), None),
    "AdamW without decay": (keras.optimizers.AdamW(weight_decay=0.0), None),
    "AdamW": (keras.optimizers.AdamW(), "AdamW with weight_decay moves or measures whole variables"),
    "amsgrad": (keras.optimizers.Adam(amsgrad=True), "Adam with amsgrad"),
    "clipnorm": (keras.optimizers.Adam(clipnorm=1.0), "the options of Adam"),
    "RMSprop": (keras.optimizers.RMSprop(), "RMSprop moves rows without a gradient"),
    "momentum": (keras.optimizers.SGD(momentum=0.9), "SGD with momentum"),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_takes_adam_without_what_moves_all_rows(name):
    optimizer, reason = LAZY[name]
    program, lazy = manifest(optimizer)[0], rule_spec("ddc", sparse="lazy")
    assert sparse_tables(program, lazy, 1) == (() if reason else (1,))
    assert (why_dense(program, lazy=True) or "").startswith(reason or "")
    assert not sparse_tables(program, rule_spec("ddc"), 1)


def test_workers_do_not_hold_tables_above_a_size_if_all_of_them_are_looked_up_ahead():
    program = manifest()[0].replaced(looked_up=[1])
    on_shards, on_workers = rule_spec("ddc", worker_tables_mb=0), rule_spec("ddc", worker_tables_mb=1)
    assert tables_on_shards(program, on_shards, 2)
    assert held_by_workers(program, on_shards, 2).size == 10
    others = [(program, on_workers), (program, rule_spec("ddc", worker_tables_mb=0, sparse=False))]
    for other, algorithm in [*others, (manifest()[0], on_shards), (program.replaced(tables=[]), on_shards)]:
        assert not tables_on_shards(other, algorithm, 2)
        assert held_by_workers(other, algorithm, 2) == other.layout.without(())


def test_the_log_of_rows_stands_in_for_copies():
    rng = np.random.default_rng(3)
    table, log, copies = np.zeros((30, 2), np.float32), RowLog(30), [np.zeros((30, 2), np.float32)]
    for version in range(1, 12):
        index = np.sort(rng.choice(30, rng.integers(1, 6), replace=False)).astype(np.int32)
        log.add(version, index, table[index])
        table[index] = rng.normal(size=(index.size, 2))
        copies.append(table.copy())
    assert log.changed_since(0) is not None
    log.keep(2, 1000)
    assert (log.changed_since(1), log.changed_since(2) is None) == (None, False)
    log.keep(2, 20)
    known = [v for v in range(12) if log.changed_since(v) is not None]
    assert known == list(range(known[0], 12))
    assert known[0] > 2
    for version in known:
        changed = log.changed_since(version)
        assert changed.tolist() == np.flatnonzero((copies[version] != table).any(1)).tolist()
        index = np.arange(0, 30, 3, dtype=np.int32)
        assert np.array_equal(log.undone(version, index, table[index]), copies[version][index])
    assert log.changed_since(11).size == 0


SEEDED = SeededRows("normal", 0.0, 1.0, 5)


def made_by_shards(optimizer="adagrad", **entries):
    """Return the program whose table shards make, the state that the script sends, and the one with the table."""
    program, whole = manifest(OPTIMIZERS[optimizer]())
    table = TABLES.views(weights := whole.weights.copy())[0]
    SEEDED.fill(table)
    entry = MadeTable(SEEDED, **entries).to_json()
    return program.replaced(looked_up=[1], made={"1": entry}), State(TABLES.dense(weights)), State(weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_make_the_same_table_whatever_their_number_and_train_it_as_one_that_was_sent(shards, optimizer):
    program, sent, whole = made_by_shards(optimizer)
    made, given = Shards(program, sent, rule_spec("ddc"), shards=shards), Shards(program, whole, rule_spec("ddc"))
    np.testing.assert_array_equal(made.read().weights, whole.weights)
    for shard in (made, given):
        shard.pull("a")
        for step in range(3):
            shard.push("a", gradient(step, 5))
    np.testing.assert_array_equal(made.read().weights, given.read().weights)
    same_variables(made.read().optimizer, given.read().optimizer)
    restored = made.restored(*made.snapshot())
    np.testing.assert_array_equal(restored.read().weights, made.read().weights)
    with_dense = np.full(TABLES.dense_size, 0.5, np.float32)
    for store, part in zip(restored.stores, sent_parts(program.layout, shards, [1]), strict=True):
        store.write(with_dense[part], {})
    np.testing.assert_array_equal(TABLES.dense(restored.read().weights), with_dense)
    np.testing.assert_array_equal(TABLES.views(restored.read().weights)[0], TABLES.views(made.read().weights)[0])


def test_a_table_goes_on_from_the_state_that_has_it():
    trained = np.random.default_rng(1).normal(size=LAYOUT.size + 7).astype(np.float32)
    sums = np.random.default_rng(2).uniform(size=(1024, 64)).astype(np.float32)
    program, sent, _ = made_by_shards(state="earlier", start=7 + LAYOUT.slots[1].start, slots={3: 9})
    stored = {"earlier": State(trained, {9: sums})}
    store = build_store(program, sent, rule_spec("ddc"), 0, 1, workers=1, stored=stored.__getitem__)
    weights, variables = store.read()
    np.testing.assert_array_equal(TABLES.views(weights)[0], TABLES.views(trained[7:])[0])
    np.testing.assert_array_equal(TABLES.dense(weights), sent.weights)
    np.testing.assert_array_equal(variables[3], sums)


@pytest.mark.parametrize("rule", ["dc-a", "ddc"])
def test_a_state_that_is_lent_stays_as_it_was_and_only_touched_blocks_are_copied(rule):
    program, sent, _ = made_by_shards()
    store = build_store(program, sent, rule_spec(rule), 0, 1, workers=2)
    store.pull("a", sequence=1)
    push(store, "a", 2, gradient(1))
    wanted, held = store.hold(records=True).copied(), store.hold(records=True)
    table = store._tables[0]
    rows = gradient(2)
    TABLES.views(rows)[0][BLOCK_ROWS : 3 * BLOCK_ROWS] = 0
    store.lookup("a", encode_numbers([np.array([2 * BLOCK_ROWS], np.int32)]), 0)
    push(store, "a", 3, rows)
    assert sorted(table._held[0]._kept) == [0, *range(3, 1024 // BLOCK_ROWS)]
    found = held.copied()
    np.testing.assert_array_equal(found.weights, wanted.weights)
    for index, array in wanted.optimizer.items():
        np.testing.assert_array_equal(found.optimizer[index], array)
    one, other = to_arrays(found.records), to_arrays(wanted.records)
    assert sorted(one) == sorted(other)
    for name, array in other.items():
        np.testing.assert_array_equal(one[name], array)
    assert table._held == []
    assert not np.array_equal(store.read()[0], wanted.weights)
    held = store.hold()
    store.write(np.ones(LAYOUT.size, np.float32), {})
    assert not (held.copied().weights == 1).any()


def test_a_table_that_shards_make_needs_an_optimizer_of_rows():
    program, sent, _ = made_by_shards()
    with pytest.raises(UsageError, match="exchanged by rows"):
        build_store(program, sent, rule_spec("ddc", sparse=False), 0, 1, workers=1)
