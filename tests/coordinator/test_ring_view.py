from __future__ import annotations

import pytest

from nfdt.coordinator.ring_view import policy_of, seen_by_coordinator, slots_of
from nfdt.core.spec import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm


def job(kind: str = "arrays", algorithm: str = "allreduce", **fit) -> JobSpec:
    return JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm(algorithm),
        cluster=ClusterSpec(workers=4),
        fit=FitSpec(**{"epochs": 1, "batch_size": 32, **fit}),
        train=DataSpec(kind=kind, samples=1003 if kind == "arrays" else None),
    )


def test_a_ring_is_one_worker_whose_batches_are_global():
    seen = seen_by_coordinator(job())
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (1, 128, 128)
    assert policy_of(job()).round_parts(1) == 1
    assert slots_of(job()) == 1


def test_fed_batches_stay_as_they_are_and_a_round_has_one_per_rank():
    assert seen_by_coordinator(job("stream")).fit.batch_size == 32
    policy = policy_of(job("stream"))
    assert (policy.round_parts(1), policy.lease_limit) == (4, 4)


def test_a_number_of_validation_batches_counts_batches_of_the_script():
    assert seen_by_coordinator(job(validation_batch_size=10, validation_steps=3)).fit.validation_batch_size == 10


@pytest.mark.parametrize("algorithm", ["bsp", "ddc-asgd"])
def test_other_jobs_are_seen_as_they_are(algorithm):
    spec = job(algorithm=algorithm)
    assert seen_by_coordinator(spec) is spec
    assert slots_of(spec) == 4


def test_each_group_is_one_worker_with_the_batch_of_its_members():
    seen = seen_by_coordinator(job(algorithm="group-sync"), groups=2)
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (2, 64, 64)
    assert slots_of(job(algorithm="group-sync")) == 0
    assert policy_of(job(algorithm="group-sync")).lease_limit is None


def test_a_group_that_pushes_differences_holds_a_round_of_steps():
    spec = job(algorithm="group-sync")
    algorithm = resolve_algorithm("group-sync", outer="delta", local_steps=5)
    assert policy_of(spec.model_copy(update={"algorithm": algorithm})).lease_limit == 5
