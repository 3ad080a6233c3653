"""The factor of the learning rate in an allreduce ring."""

from __future__ import annotations

import pytest

from nfdt.core.specs.job import DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.model.training.ring_rate import learning_rate_factor, ring_rate


@pytest.mark.parametrize(("kind", "full"), [(None, 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_factor_of_the_learning_rate(kind, full):
    assert learning_rate_factor(kind, 4, 0, 0) == full
    assert learning_rate_factor(kind, 4, 100, 10) == full


def test_warm_up_rises_from_about_one_to_the_full_factor():
    factors = [learning_rate_factor("linear", 8, step, 10) for step in range(12)]
    assert 1.0 < factors[0] < 2.0
    assert factors == sorted(factors)
    assert factors[10] == factors[11] == 8.0


@pytest.mark.parametrize(
    ("train", "steps_per_epoch"),
    [
        ({"kind": "arrays", "samples": 4 * 3 * 10 - 5}, None),  # 3 global batches, the last one short
        ({"kind": "indexed", "batches": 12, "code": "0" * 64}, None),  # 3 rounds of 4 batches
        ({"kind": "stream"}, 3),
    ],
)
def test_the_warm_up_lasts_so_many_epochs_of_global_batches(train, steps_per_epoch):
    spec = JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("allreduce", scale_lr="linear", warmup_epochs=2),
        fit=FitSpec(epochs=3, batch_size=10, steps_per_epoch=steps_per_epoch),
        train=DataSpec(**train),
    )
    assert [ring_rate(spec, 4, step) for step in (0, 5, 6, 7)] == [
        pytest.approx(1 + 3 / 7),
        pytest.approx(1 + 3 * 6 / 7),
        4.0,
        4.0,
    ]
