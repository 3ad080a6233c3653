"""Memory of the store: it depends on the model and the workers, never on the number of steps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.seeded_rows import SeededRows
from nfdt.core.arrays.table_rows import Rows, Table, TableLayout
from nfdt.core.sharding import OptimizerSlot
from nfdt.shard.optimizer_state import traits_of_class
from nfdt.shard.row_optimizer import RowAdagrad
from nfdt.shard.table import PushContext, ShardTable
from nfdt.update_rules import make_rule
from nfdt.update_rules.blocks import TableRows
from tests.support.shard_cluster import rule_spec
from tests.support.store_memory import push_steps, resident_bytes, store_of

pytestmark = pytest.mark.processes

SMALL = ParameterLayout.of([("w", (64,))])
IMPORT = "from tests.support.store_memory import vectors_of_ten_workers"


def test_ten_thousand_steps_leave_nothing_behind():
    store = store_of(SMALL, overlap=1)
    push_steps(store, 1_000)
    objects, resident = len(gc.get_objects()), resident_bytes()
    push_steps(store, 10_000, start=1_000)
    assert resident_bytes() - resident < 8 * 2**20
    assert len(gc.get_objects()) - objects < 200
    assert store.version == 11_000


@pytest.mark.parametrize(
    ("rule", "overlap", "backup_format", "vectors"),
    [
        ("ddc", 0, "anchored", 0.5),
        pytest.param("dc-a", 0, "exact", 2, marks=pytest.mark.long),
        pytest.param("ddc", 1, "exact", 2, marks=pytest.mark.long),
        pytest.param("plain", 0, "none", 0, marks=pytest.mark.long),
    ],
)
def test_a_worker_costs_its_backup_format_and_the_rules_state(rule, overlap, backup_format, vectors):
    program = f"{IMPORT}; print(vectors_of_ten_workers({rule!r}, {overlap}, {backup_format!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 10 * vectors - 1 < float(done.stdout) < 10 * vectors + 3  # plus an anchor or two, and working memory


def test_untouched_rows_of_a_table_that_shards_make_take_no_memory():
    rows, width, touched = 4_000_000, 16, np.arange(0, 4_000_000, 20_000, dtype=np.int32)
    before = resident_bytes()
    weights = TableLayout(rows * width, (Table(0, rows, width),)).spread(np.zeros(0, np.float32))
    options = {"initial_accumulator_value": 0.1, "epsilon": 1e-7}
    table = ShardTable(
        weights.reshape(rows, width),
        make_rule(rule_spec("dc"), traits_of_class("Adagrad", options), TableRows()),
        RowAdagrad(options),
        [OptimizerSlot(3, 0, (rows, width))],
        made=True,
        seeded=SeededRows("normal", 0.0, 1.0, 1),
    )
    gradient = Rows(touched, np.ones((touched.size, width), np.float32))
    table.keep_moved("a", table.moved("a", gradient, PushContext(0, 0, 0.1, 0)), 1)
    held = table.hold(records=True)
    assert (
        sum(piece.nbytes for pieces in (held.weights, *held.slots.values()) for piece in pieces.arrays)
        == 2 * 4 * rows * width
    )
    assert resident_bytes() - before < 40 * 2**20
