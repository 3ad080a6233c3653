from __future__ import annotations

import pytest

from nfdt.coordinator.topology_view import grouped, view_of
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm


def job(
    kind: str = "arrays", algorithm: str = "allreduce", options: dict | None = None, cluster: dict | None = None, **fit
) -> JobSpec:
    return JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm(algorithm, **(options or {})),
        cluster=ClusterSpec(**{"workers": 4, **(cluster or {})}),
        fit=FitSpec(**{"epochs": 1, "batch_size": 32, **fit}),
        train=DataSpec(kind=kind, samples=1003 if kind == "arrays" else None),
    )


def effective(spec: JobSpec, **options) -> JobSpec:
    return view_of(spec).effective_spec(spec, **options)


def policy_of(spec: JobSpec):
    return view_of(spec).policy(spec)


def slots_wanted(spec: JobSpec) -> int:
    return view_of(spec).slots_wanted(spec)


def test_a_ring_is_one_worker_whose_batches_are_global():
    seen = effective(job())
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (1, 128, 128)
    assert policy_of(job()).round_parts(1) == 1
    assert slots_wanted(job()) == 1


def test_fed_batches_stay_as_they_are_and_a_round_has_one_per_rank():
    assert effective(job("stream")).fit.batch_size == 32
    policy = policy_of(job("stream"))
    assert (policy.round_parts(1), policy.lease_limit) == (4, 4)


def test_a_number_of_validation_batches_counts_batches_of_the_script():
    assert effective(job(validation_batch_size=10, validation_steps=3)).fit.validation_batch_size == 10


@pytest.mark.parametrize("algorithm", ["bsp", "ddc-asgd"])
def test_other_jobs_are_seen_as_they_are(algorithm):
    spec = job(algorithm=algorithm)
    assert effective(spec) is spec
    assert slots_wanted(spec) == 4


def test_each_group_is_one_worker_with_the_batch_of_its_members():
    seen = effective(job(algorithm="group-sync"), groups=2)
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (2, 64, 64)
    assert slots_wanted(job(algorithm="group-sync")) == 0
    assert policy_of(job(algorithm="group-sync")).lease_limit is None


def test_a_ring_that_has_shrunk_is_seen_with_the_ranks_it_has():
    seen = effective(job(validation_batch_size=10), ranks=3)
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (1, 96, 30)


def test_an_elastic_ring_reports_when_it_commits_and_another_one_when_it_likes():
    assert policy_of(job(cluster={"min_workers": 2, "commit_steps": 7})).lease_limit == 7
    assert policy_of(job()).lease_limit is None


def test_a_group_that_is_short_of_members_has_the_batch_of_the_largest():
    seen = effective(job(algorithm="group-sync", validation_batch_size=10), groups=3)
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (3, 64, 20)


def test_groups_take_fed_batches_and_counted_validation_as_they_are():
    seen = effective(job("stream", "group-sync", validation_batch_size=10, validation_steps=3), groups=2)
    assert (seen.cluster.workers, seen.fit.batch_size, seen.fit.validation_batch_size) == (2, 32, 10)


def test_flat_workers_that_turn_to_groups_overlap_nothing_and_stay_the_same_job():
    flat = job(algorithm="auto", options={"overlap": 1})
    spec = grouped(flat)
    assert (spec.algorithm.topology, spec.algorithm.overlap) == ("groups", 0)
    assert spec.algorithm.model_copy(update={"topology": "flat", "overlap": 1}) == flat.algorithm
    assert spec.model_copy(update={"algorithm": flat.algorithm}) == flat


@pytest.mark.parametrize(
    ("other", "allowed"),
    [
        ({}, True),
        ({"kind": "stream"}, False),
        ({"steps_per_epoch": 5}, False),
        ({"options": {"plan": "overlap"}}, False),
        ({"algorithm": "group-sync", "options": {"plan": "topology"}}, False),
    ],
    ids=["auto", "stream", "counted steps", "no such plan", "groups already"],
)
def test_only_a_job_that_plans_whole_epochs_of_flat_workers_may_turn_to_groups(other, allowed):
    spec = job(**{"algorithm": "auto", **other})
    assert view_of(spec).may_form_groups(spec) == allowed
