"""Gradients of several simulated workers in one call: the jobs of one by one, in the same virtual time."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.scripts import environment

DEADLINE_S = 500  # of one backend, on a busy machine
pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(3 * DEADLINE_S)]
JOBS = ["ddc-asgd", "overlap, as on a GPU", "dbs", "bsp", "sums", "failing", "stream", "groups"]


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.gradients_together"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(KERAS_BACKEND="jax"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_they_are_computed_together_on_accelerators_only(report):
    assert report["backend"] == "jax"
    assert report["lanes"] == [1, 32]


@pytest.mark.parametrize("job", JOBS)
def test_no_event_happens_at_another_time_or_in_another_order(report, job):
    one_by_one, together = report["jobs"][job]
    assert together["schedule"] == one_by_one["schedule"]
    assert together["gradients"] == one_by_one["gradients"] > 0


@pytest.mark.parametrize("job", JOBS)
def test_weights_and_state_of_the_workers_agree_to_rounding(report, job):
    one_by_one, together = report["jobs"][job]
    for name in ("weights", "untrained"):
        left, right = (np.concatenate([np.ravel(a) for a in each[name]] or [[]]) for each in (one_by_one, together))
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("job", JOBS)
def test_metrics_and_running_logs_agree_to_rounding(report, job):
    one_by_one, together = report["jobs"][job]
    assert together["history"].keys() == one_by_one["history"].keys() > {"loss", "mae", "r2_score"}
    for name, values in one_by_one["history"].items():
        assert together["history"][name] == pytest.approx(values, rel=1e-6, abs=1e-6), name
    for mine, theirs in zip(together["logs"], one_by_one["logs"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("job", JOBS)
def test_fewer_calls_than_gradients_are_made(report, job):
    one_by_one, together = report["jobs"][job]
    assert one_by_one["widths"] == []
    widths, count = together["widths"], together["gradients"]
    if job == "groups":  # the machines of a group train one after the other, as their state is one
        assert widths == [1] * count
    else:
        assert len(widths) < count <= sum(widths)
        assert max(widths) == (5 if "GPU" in job else 3 if job in ("dbs", "failing") else 4)


def test_batches_of_unequal_size_are_computed_apart(report):
    sizes = {job: report["jobs"][job][1]["signatures"] for job in ("ddc-asgd", "dbs", "stream")}
    assert sizes["ddc-asgd"] == 2
    assert sizes["dbs"] > 2
    assert sizes["stream"] == 1


def test_a_lost_worker_s_gradient_is_computed_and_not_used(report):
    _, together = report["jobs"]["failing"]
    assert sum(together["widths"]) > together["gradients"]


def test_models_whose_gradients_would_differ_are_computed_one_by_one(report):
    together = {name for name, fits in report["refusals"].items() if fits}
    assert together == {"plain", "fixed loss scale"}
    assert len(report["refusals"]) == 10


@pytest.mark.parametrize("algorithm", ["ddc-asgd", "asgd"])
def test_scripts_on_jax_are_simulated(report, algorithm):
    code, output = report["commands"][algorithm]
    assert (code, "samples/s" in output) == (0, True), output
