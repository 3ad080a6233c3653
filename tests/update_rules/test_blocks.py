"""Blocks: sums and factors compared with loops, and equal ones on shards whose borders lie between blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.arrays.layout import BLOCK_ROWS, ParameterLayout
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.manifest import Manifest
from nfdt.shard import tensors
from nfdt.shard.building import blocks_of
from nfdt.update_rules import OptimizerTraits, make_rule
from nfdt.update_rules.blocks import Elements, KernelBlocks, TableRows
from tests.support.simulated_shard import SimulatedShard

SHAPES = [(40, 3), (3,), (3, 3, 4, 5), (5,), (), (20,), (0, 4), (7, 6)]
TABLES = [False] * 7 + [True]
VARIABLES = st.lists(
    st.tuples(st.lists(st.integers(0, 20), max_size=3).map(tuple), st.booleans()).map(
        lambda v: (v[0], v[1] and len(v[0]) == 2)
    ),
    min_size=1,
    max_size=4,
)


def labels(shapes, tables):
    """Return the block of each element, computed in a loop."""
    names = []
    for variable, (shape, table) in enumerate(zip(shapes, tables, strict=True)):
        for place in np.ndindex(*shape):
            row = np.ravel_multi_index(place[:-1] or (0,), shape[:-1] or (1,)) if len(shape) > 1 else (*place, 0)[0]
            column = place[-1] if len(shape) > 1 else 0
            names.append((variable, row) if table else (variable, row // BLOCK_ROWS, column))
    return names


def check(shapes, tables, ops=np):
    names, blocks = labels(shapes, tables), KernelBlocks(shapes, tables)
    vector = np.random.default_rng(0).normal(size=len(names)).astype(np.float32)
    order = list(dict.fromkeys(sorted(set(names))))
    wanted = {name: vector[[n == name for n in names]].sum() for name in order}
    sums = np.asarray(blocks.sums(ops, ops.reshape(vector, (-1,))))
    np.testing.assert_allclose(sums, [wanted[name] for name in order] if names else [], rtol=1e-4, atol=1e-5)
    scaled = np.asarray(blocks.scaled(ops, ops.reshape(vector, (-1,)), ops.reshape(sums, (-1,))))
    np.testing.assert_allclose(scaled, vector * [wanted[name] for name in names], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", [np, tensors], ids=["numpy", "tensorflow"])
def test_sums_and_factors_of_a_units_weights(ops):
    check(SHAPES, TABLES, ops)


@given(VARIABLES)
def test_any_variables_are_divided_without_rest(variables):
    check([shape for shape, _ in variables], [table for _, table in variables])


def test_elements_and_rows():
    vector, table = np.arange(4.0), np.arange(6.0).reshape(3, 2)
    assert np.array_equal(Elements().sums(np, vector), vector)
    assert np.array_equal(Elements().scaled(np, vector, vector), vector**2)
    assert np.array_equal(TableRows().sums(np, table), [1, 5, 9])
    assert np.array_equal(TableRows().scaled(np, table, np.arange(3.0)), [[0, 0], [2, 3], [8, 10]])


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_shards_cut_between_blocks_move_as_one(kind):
    layout = ParameterLayout.of([("kernel", (64 * BLOCK_ROWS, 10)), ("bias", (10,))])
    manifest = Manifest({"layout": layout.to_json(), "divisible": True})
    layout = manifest.layout

    def shards(count):
        rule = lambda run: make_rule(  # noqa: E731
            resolve_algorithm("ddc-asgd"), OptimizerTraits(kind, momentum=0.9), blocks_of(manifest, run)
        )
        start = np.linspace(-1, 1, layout.size, dtype=np.float32)
        return [(run, SimulatedShard(rule(run), start[run.elements])) for run in layout.cut(count)]

    whole, parts = shards(1), shards(3)
    assert all(run.stop % (10 * BLOCK_ROWS) == 0 for run, _ in parts[:-1])
    for made in (whole, parts):
        for run, shard in made:
            rng = np.random.default_rng(4)
            for worker in "ab":
                shard.pull(worker)
            for step in range(6):
                gradient = rng.normal(size=layout.size).astype(np.float32)
                shard.push("aabbab"[step], gradient[run.elements], 0.1)
    assert np.array_equal(whole[0][1].weights, np.concatenate([shard.weights for _, shard in parts]))


def test_drift_along_the_step_takes_a_gradient_back_and_drift_against_it_adds_to_it():
    rule = make_rule(resolve_algorithm("ddc-asgd", gap=0), OptimizerTraits("sgd"), KernelBlocks([(2, 2)], [False]))
    shard = SimulatedShard(rule, np.zeros(4))
    for worker in "abc":
        shard.pull(worker)
    shard.push("a", np.array([1.0, -2.0, 1.0, -2.0]), 0.1)
    shard.push("b", np.array([2.0, 1.0, 2.0, 1.0]), 0.1)
    assert shard.last_gradient == pytest.approx([0, 2, 0, 2])  # drift along unit 1's step, against unit 2's
    shard.push("c", np.array([1.0, 0.0, -1.0, 0.0]), 0.1)
    assert shard.last_gradient == pytest.approx([1, 0, -1, 0])  # at right angles to the drift
