"""Memory of the processes of a job, by the formula of docs/memory.md."""

from __future__ import annotations

import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from nfdt.planning.memory import COSTS, MB, ModelBytes, estimate, snapshot_bytes, stored_bytes

VECTOR = 1000 * MB
SGD, MOMENTUM, ADAM = (ModelBytes(VECTOR, vectors * VECTOR) for vectors in (1, 2, 3))


def memory(model=ADAM, preset="ddc-asgd", *, workers=1, shards=1, shared=True, **options):
    return estimate(model, resolve_algorithm(preset, **options), workers=workers, shards=shards, shared=shared)


def vectors(more, less):
    """Return the difference of what two shards hold, in vectors."""
    return (more.shard.steady - less.shard.steady) / VECTOR


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_tiny_model_takes_what_the_processes_take_alone(preset, shared):
    found = memory(ModelBytes(4, 4), preset, workers=2, shared=shared)
    assert [found.client.peak, found.server.peak, found.shard.peak] == [
        pytest.approx(COSTS[role].base, rel=1e-3) for role in ("client", "server", "shard")
    ]


def test_a_shard_keeps_the_state_that_of_the_rule_and_the_weights_of_each_worker():
    assert vectors(memory(preset="asgd"), memory(MOMENTUM, "asgd")) == pytest.approx(1)
    assert vectors(memory(), memory(preset="asgd")) == pytest.approx(1 + 3 / 16)
    assert vectors(memory(SGD), memory(MOMENTUM)) == 0, "the rule holds a reserve in any case"
    backup, shared, reply = 1, 1, 1
    assert vectors(memory(workers=2), memory(workers=1)) == pytest.approx(backup + shared + reply)
    assert vectors(memory(workers=2, overlap=1), memory(workers=2)) == pytest.approx(2 * (backup + shared))
    assert vectors(memory(workers=21), memory(workers=20)) == pytest.approx(backup / 2 + shared)
    assert vectors(memory(preset="bsp"), memory(preset="asgd")) == pytest.approx(1), "the sum of a round"


def test_shards_divide_all_that_is_not_the_process_itself():
    whole, half = memory(workers=3), memory(workers=3, shards=2)
    base = COSTS["shard"].base
    assert half.shard.peak - base == pytest.approx((whole.shard.peak - base) / 2)
    assert half.worker.steady - whole.worker.steady == pytest.approx(1.8 * VECTOR), "a worker joins their weights"


def test_tables_that_shards_make_are_in_no_script_and_are_lent_by_shards_without_a_copy():
    table = 10 * VECTOR
    made = ModelBytes(VECTOR + table, VECTOR + 2 * table, table, table, 2 * table)
    for shards in (1, 2):
        with_table, alone = memory(made, shards=shards), memory(SGD, shards=shards)
        assert (with_table.client, with_table.worker) == (alone.client, alone.worker)
        assert with_table.shard.steady - alone.shard.steady == 2 * table / shards
        assert with_table.shard.peak - alone.shard.peak == 2 * table / shards


def test_shared_memory_counts_half_on_either_side_and_a_stream_has_a_buffer_on_the_shard():
    shared, stream = memory(), memory(shared=False)
    assert shared.worker == stream.worker
    assert memory(overlap=1).worker.steady - shared.worker.steady == VECTOR
    assert vectors(shared, stream) == 0


def test_a_worker_that_encodes_gradients_and_a_rank_that_holds_the_optimizer_take_more():
    plain = memory().worker.steady
    assert memory(codec="int8").worker.steady - plain == 3 * VECTOR
    assert memory(preset="allreduce", shared=False).worker.steady - memory(shared=False).worker.steady > 3 * VECTOR


def test_the_peaks_of_shards_and_server_meet_but_not_that_of_the_client():
    found = memory(workers=2)
    together = found.on_machine(client=True, server=True, shards=1, workers=2)
    assert together < found.client.peak + found.server.peak + found.shard.peak + 2 * found.worker.peak
    assert together >= found.client.steady + found.server.peak + found.shard.peak + 2 * found.worker.peak
    assert found.on_machine(client=False, server=False, shards=0, workers=3) == 3 * found.worker.peak
    assert found.on_machine(client=False, server=False, shards=2, workers=0) == 2 * found.shard.peak


def test_a_snapshot_holds_the_state_and_that_of_the_rule():
    by_default = resolve_algorithm("ddc-asgd")
    assert snapshot_bytes(ADAM, by_default, 2) == pytest.approx((3 + 2 + 3 / 16) * VECTOR)
    assert snapshot_bytes(ADAM, resolve_algorithm("dc-asgd-a"), 2) == pytest.approx((3 + 2) * VECTOR)
    assert stored_bytes(ADAM, by_default, 2) == pytest.approx(2 * (3 + 2 + 3 / 16 + 3) * VECTOR)
    assert stored_bytes(ADAM, resolve_algorithm("allreduce"), 2) == 6 * VECTOR
    assert stored_bytes(ADAM, resolve_algorithm("allreduce"), 2, checkpoints=False) == 3 * VECTOR
    assert stored_bytes(ADAM, by_default, 2, checkpoints=False) == pytest.approx(2 * (3 + 2 + 3 / 16) * VECTOR)
    adagrad, sgd = (ModelBytes(VECTOR, slots * VECTOR, VECTOR, VECTOR, slots * VECTOR) for slots in (2, 1))
    assert snapshot_bytes(adagrad, by_default, 1) == pytest.approx((2 + 3 / 16) * VECTOR)
    assert snapshot_bytes(sgd, by_default, 1) == pytest.approx((1 + 1 + 3 / 16) * VECTOR)
