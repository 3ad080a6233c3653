"""Jobs with ranks that a backend cannot train, and what their errors offer instead."""

from __future__ import annotations

import pytest

from nfdt.core.errors import CaptureError
from nfdt.core.jobs.rank_backends import check_ranks
from nfdt.core.specs.job import ClusterSpec, resolve_algorithm


def check(backend: str, algorithm: str = "allreduce", **cluster) -> None:
    check_ranks(resolve_algorithm(algorithm), ClusterSpec(workers=2, **cluster), backend)


@pytest.mark.parametrize("algorithm", ["allreduce", "group-sync"])
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_ring_of_a_fixed_number_of_slots_trains(backend, algorithm):
    check(backend, algorithm)
    check(backend, algorithm, launcher="slots")


def test_horovod_does_the_rest():
    check("tensorflow", min_workers=1)
    check("tensorflow", launcher="mpirun", hosts="a:1,b:1", cycle_time_ms=2)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_flat_algorithms_have_no_ranks(backend):
    check(backend, "ddc-asgd", min_workers=1)


@pytest.mark.feature("Elastic rings on JAX and PyTorch", area="Algorithms", status="refused")
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("limit", ["min_workers", "max_workers"])
def test_elastic_rings_are_refused_elsewhere(limit, backend):
    with pytest.raises(CaptureError, match=f"'{backend}', whose number is fixed. Take 'ddc-asgd' or 'bsp'"):
        check(backend, **{limit: 2})


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"launcher": "world"}, "launcher='world'"),
        ({"launcher": "mpirun", "cycle_time_ms": 2}, "launcher='mpirun', cycle_time_ms"),
        ({"hosts": "a:1,b:1"}, "hosts"),
        ({"autotune": True}, "autotune"),
    ],
)
def test_options_of_horovod_and_its_launchers_are_refused_on_jax(options, received):
    with pytest.raises(CaptureError, match=f"Received: {received}. .* `nfdt worker`.*`mpirun nfdt mpi --algorithm all"):
        check("jax", **options)
