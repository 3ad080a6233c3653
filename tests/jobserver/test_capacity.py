"""Jobs that a server refuses because it can never run them."""

import re

import numpy as np
import pytest

from nfdt.coordinator.topology_view import view_of
from nfdt.core.arrays.seeded_rows import SeededRows
from nfdt.core.errors import UsageError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.jobserver.capacity import Capacity, check_capacity, model_bytes
from nfdt.model.program.manifest import MadeTable, Manifest
from nfdt.model.program.state import dump_state
from nfdt.planning.memory import ModelBytes

GIGABYTE = 2**30


def job(topology="flat", **cluster):
    named = {"flat": "asgd", "ring": "allreduce", "groups": "group-sync"}[topology]
    return JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm(named),
        cluster=ClusterSpec(**{"workers": 2, **cluster}),
        fit=FitSpec(epochs=1, batch_size=32),
        train=DataSpec(kind="arrays", structure=0, arrays=["1" * 64], samples=64),
    )


def test_the_size_of_a_model_counts_tables_that_shards_make(tmp_path):
    slots = [{"shape": [], "variable": -1}, {"shape": [1000, 100], "variable": 0}, {"shape": [9], "variable": 1}]
    made = {"0": MadeTable(SeededRows("normal", 0.0, 1.0, 3)).to_json()}
    manifest = Manifest(
        {"layout": [["table", [1000, 100]], ["kernel", [9]]], "optimizer_variables": slots, "made": made}
    )
    artifacts, table = ArtifactStore(tmp_path), np.zeros((1000, 100), np.float32)
    sent = artifacts.put(dump_state(np.zeros(9), {0: np.zeros(()), 2: np.zeros(9)}, {}))
    whole = artifacts.put(dump_state(np.zeros(100_009), {0: np.zeros(()), 1: table, 2: np.zeros(9)}, {}))
    found = [model_bytes(job(), manifest.replaced(state=state), artifacts) for state in (sent, whole)]
    for each in found:
        assert (each.weights, each.made_weights, each.made_state) == (400_036, 400_000, 800_000)
        assert each.sent.weights == 36
        assert 800_000 < each.state < 801_000


def check(spec, *, weights_gb=0.5, state_gb=1.5, cores=2, memory_gb=64.0, workers=None, local=True, **more):
    here = Capacity(cores, int(memory_gb * GIGABYTE), workers, local, **more)
    check_capacity(spec, view_of(spec), ModelBytes(int(weights_gb * GIGABYTE), int(state_gb * GIGABYTE)), here)


def test_a_job_of_a_common_size_is_taken():
    check(job(workers=4, shards=2))


def test_more_workers_than_there_are_slots_are_refused_with_the_remedy():
    check(job(workers=2), workers=2)
    with pytest.raises(UsageError, match=r"workers=12: expected at most 2.*nfdt worker .* --slots 10"):
        check(job(workers=12), workers=2)


def test_workers_that_come_from_elsewhere_are_not_counted():
    check(job(workers=1000), local=False)  # asgd keeps nothing for each


@pytest.mark.parametrize("topology", ["ring", "groups"])
def test_ranks_need_no_slots(topology):
    check(job(topology, workers=4), workers=1)


def test_more_shards_than_a_machine_should_run_are_refused_with_what_there_is():
    check(job(shards=8))
    check(job(shards=64), cores=32)
    with pytest.raises(UsageError, match=r"shards=16: expected at most 8.*2 cores"):
        check(job(shards=16))


def test_shards_of_other_machines_are_counted():
    check(job(shards=10), offered_shards=2)
    with pytest.raises(
        UsageError, match=r"shards=11: expected at most 10: 8 on .*2 cores, and 2 on others.*--shards 1`"
    ):
        check(job(shards=11), offered_shards=2)


def needed_gb(spec, **options):
    """Return the memory that the refusal of a job states."""
    with pytest.raises(UsageError) as refused:
        check(spec, memory_gb=0.1, **options)
    return float(re.search(r"about ([\d.]+) GB of memory", str(refused.value))[1])


def test_a_job_is_taken_where_its_whole_peak_fits_and_refused_with_each_process_and_the_remedy():
    needed = needed_gb(job(workers=2))
    check(job(workers=2), memory_gb=needed + 0.1)
    text = (
        rf"about {needed} GB of memory .*0\.5 GB with a state of 1\.5 GB: at most the server [\d.]+ GB, 1 shards "
        r"[\d.]+ GB each, 2 workers [\d.]+ GB each.*Expected: at most 1\.0 GB.*fewer shards or workers.*SGD has none"
    )
    with pytest.raises(UsageError, match=text):
        check(job(workers=2), memory_gb=1.0)


def test_the_script_counts_where_it_runs_on_the_same_machine_and_waits_for_its_job():
    elsewhere = needed_gb(job(workers=2))
    assert needed_gb(job(workers=2), client=True) > elsewhere + 1.0
    detached = job(workers=2).model_copy(update={"attended": False})
    assert needed_gb(detached, client=True) == elsewhere


def test_every_worker_takes_memory_of_its_own_and_of_the_shards():
    assert needed_gb(job(workers=4)) - needed_gb(job(workers=3)) > 4 * 0.5


def test_shards_and_workers_on_other_machines_take_no_memory_here():
    one, two = needed_gb(job(shards=2), offered_shards=1), needed_gb(job(shards=2))
    assert needed_gb(job(shards=2), offered_shards=2) < one < two
    check(job(workers=20), memory_gb=24, local=False)
    with pytest.raises(UsageError, match="fewer shards or workers"):
        check(job(workers=20), memory_gb=24)


def test_every_rank_of_a_ring_has_the_optimizer():
    assert needed_gb(job("ring", workers=10)) - needed_gb(job("ring", workers=9)) > 1.5 + 2 * 0.5


def test_a_disk_without_room_for_snapshots_and_checkpoints_is_refused_before_training():
    check(job(), disk_bytes=6 * GIGABYTE)
    text = r"up to 6\.0 GB on the server's disk.* state of 1\.5 GB.*at most 5\.0 GB.*nfdt jobs delete.*--state-dir"
    with pytest.raises(UsageError, match=text):
        check(job(), disk_bytes=5 * GIGABYTE)
    check(job("ring"), disk_bytes=3 * GIGABYTE)


def test_the_default_rule_stores_its_own_state_with_each_snapshot():
    by_default = job().model_copy(update={"algorithm": resolve_algorithm("ddc-asgd")})
    with pytest.raises(UsageError, match=r"up to 8\.2 GB on"):  # 2 x (1.5 + 1.0 + 3/16 x 0.5) + 2 x 1.5
        check(by_default, disk_bytes=6 * GIGABYTE)
