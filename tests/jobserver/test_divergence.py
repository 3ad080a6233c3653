"""Warnings of a training that diverges, when it does, with advice for the job's algorithm."""

from __future__ import annotations

import pytest

from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.jobserver.job_results import advice


def spec(algorithm: str, workers: int = 4) -> JobSpec:
    return JobSpec(
        name="m",
        algorithm=resolve_algorithm(algorithm),
        cluster=ClusterSpec(workers=workers),
        fit=FitSpec(epochs=1),
        program="0" * 64,
        train=DataSpec(kind="stream"),
    )


@pytest.mark.parametrize(
    ("algorithm", "workers", "text"),
    [
        ("asgd", 4, "algorithm='ddc-asgd'"),
        ("bsp", 4, "batches of 4 workers"),
        ("allreduce", 4, "batches of 4 workers"),
    ],
)
def test_the_advice_fits_the_algorithm(algorithm, workers, text):
    assert text in advice(spec(algorithm, workers))


@pytest.mark.parametrize(("algorithm", "workers"), [("ddc-asgd", 4), ("asgd", 1), ("bsp", 1)])
def test_the_advice_recommends_nothing_that_the_job_has(algorithm, workers):
    text = advice(spec(algorithm, workers))
    assert "lower the learning rate" in text
    assert "ddc-asgd" not in text
    assert "batches of" not in text
