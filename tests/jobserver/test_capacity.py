"""Jobs that a server refuses because it can never run them."""

import pytest

from nfdt.coordinator.topology_view import view_of
from nfdt.core.errors import UsageError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec
from nfdt.jobserver.context import Capacity, check_capacity

GIGABYTE = 2**30


def job(topology="flat", **cluster):
    named = {"flat": "asgd", "ring": "allreduce", "groups": "group-sync"}[topology]
    return JobSpec(
        program="0" * 64,
        algorithm=AlgorithmSpec(name=named, topology=topology),
        cluster=ClusterSpec(**{"workers": 2, **cluster}),
        fit=FitSpec(epochs=1, batch_size=32),
        train=DataSpec(kind="arrays", structure=0, arrays=["1" * 64], samples=64),
    )


def check(spec, *, weights_gb=0.5, state_gb=1.5, cores=2, memory_gb=24.0, workers=None, local=True, offered=0):
    here = Capacity(cores, int(memory_gb * GIGABYTE), workers, local, offered)
    check_capacity(
        spec, view_of(spec), weights_bytes=int(weights_gb * GIGABYTE), state_bytes=int(state_gb * GIGABYTE), here=here
    )


def test_a_job_of_a_common_size_is_taken():
    check(job(workers=4, shards=2))


def test_more_workers_than_there_are_slots_are_refused_with_the_remedy():
    check(job(workers=2), workers=2)
    with pytest.raises(UsageError, match=r"workers=12: expected at most 2.*nfdt worker .* --slots 10"):
        check(job(workers=12), workers=2)


def test_workers_that_come_from_elsewhere_are_not_counted():
    check(job(workers=1000), local=False)


@pytest.mark.parametrize("topology", ["ring", "groups"])
def test_ranks_need_no_slots(topology):
    check(job(topology, workers=4), workers=1)


def test_more_shards_than_a_machine_should_run_are_refused_with_what_there_is():
    check(job(shards=8))
    check(job(shards=64), cores=32)
    with pytest.raises(UsageError, match=r"shards=16: expected at most 8.*2 cores"):
        check(job(shards=16))


def test_shards_of_other_machines_are_counted():
    check(job(shards=10), offered=2)
    with pytest.raises(
        UsageError, match=r"shards=11: expected at most 10: 8 on .*2 cores, and 2 on others.*--shards 1`"
    ):
        check(job(shards=11), offered=2)


def test_shards_on_other_machines_take_no_memory_here():
    with pytest.raises(UsageError, match="at least 7.5 GB"):
        check(job(shards=2), memory_gb=7.0)
    check(job(shards=2), memory_gb=7.0, offered=2)


def test_a_model_that_does_not_fit_is_refused_with_what_there_is():
    check(job(workers=2), memory_gb=8)
    with pytest.raises(UsageError, match=r"at least 7\.5 GB.*2 workers.*at most 7\.0 GB"):
        check(job(workers=2), memory_gb=7)


def test_a_model_that_does_not_fit_with_its_workers_may_fit_without_them():
    with pytest.raises(UsageError, match="fewer workers"):
        check(job(workers=20), memory_gb=24)
    check(job(workers=20), memory_gb=24, local=False)


def test_every_rank_of_a_ring_has_the_optimizer():
    check(job("groups", workers=10), memory_gb=20)
    with pytest.raises(UsageError, match="10 workers"):
        check(job("ring", workers=10), memory_gb=20)
