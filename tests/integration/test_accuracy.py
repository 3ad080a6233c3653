"""Accuracy on digits with four workers, compared with plain Keras."""

from __future__ import annotations

import statistics

import pytest

import nfdt
from benchmarks.run.accuracy import WORKERS, train

pytestmark = pytest.mark.processes

SEEDS = (0, 1, 2)


@pytest.mark.long
def test_ddc_asgd_with_4_workers_learns_as_well_as_plain_keras():
    plain = [train(0.05, seed, epochs=20).accuracy for seed in SEEDS]
    # Equally fast workers that overlap although there may be fewer cores than workers.
    with nfdt.session(workers=WORKERS, algorithm="ddc-asgd", emulate={"step_ms": (10.0,) * WORKERS}):
        outcomes = [train(0.05, seed, epochs=20) for seed in SEEDS]
    assert statistics.mean(o.staleness for o in outcomes) > 2.0, "the gradients were delayed"
    assert statistics.mean(o.accuracy for o in outcomes) >= statistics.mean(plain) - 0.02
