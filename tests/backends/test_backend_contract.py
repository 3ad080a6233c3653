"""Contract of the steps on every backend: equal to Keras there, and to each other across backends."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support import loss_cases
from tests.support.scripts import environment

DEADLINE_S = 500  # of one backend, on a busy machine
pytestmark = [pytest.mark.processes, pytest.mark.timeout(3 * DEADLINE_S)]
BACKENDS = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]
MODES = ["momentum", "adam", "schedule", "scaled", "eager", "not compiled"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return the report of the program on each backend; the first one packs the model that all train."""
    folder = tmp_path_factory.mktemp("program")
    found = {}
    for name in BACKENDS:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.support.backend_contract", str(folder)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=environment(KERAS_BACKEND=name),
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(params=BACKENDS)
def report(request, reports):
    return reports[request.param]


def test_each_report_is_of_its_backend_which_needs_no_other(reports):
    assert {"tensorflow", "jax"} <= reports.keys()
    for name, report in reports.items():
        assert report["backend"] == name
        assert report["tensorflow"] == (name == "tensorflow")


@pytest.mark.feature("Keras on PyTorch", area="Launchers and environments", note="proved where PyTorch is installed")
@pytest.mark.parametrize("mode", MODES)
def test_training_on_the_gradients_equals_keras(report, mode):
    found = report["training"][mode]
    assert found["moved"] > 0.1
    assert found["weights"] < 5e-6
    logs, expected = found["logs"]
    assert logs == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(*found["untrained"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["momentum", "schedule", "eager"])
def test_an_optimizer_steps_on_a_worker_as_in_keras(report, mode):
    found = report["own_optimizers"][mode]
    assert not found["is_code"]
    assert found["moved"] > 0.1
    assert found["weights"] < 5e-6
    logs, expected = found["logs"]
    assert logs == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(*found["untrained"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_schedule_follows_the_position_in_the_job(report):
    assert report["at_positions"] == pytest.approx([1.0, 0.5, 0.125], rel=1e-3)


def test_a_step_is_compiled_once_per_batch_size(report):
    compiled, eager = report["training"]["adam"]["traces"], report["training"]["eager"]["traces"]
    assert (compiled, eager) == {"tensorflow": (2, 0), "jax": (2, 4), "torch": (0, 0)}[report["backend"]]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_gives_unscaled_float32_gradients_and_reports_an_overflow(report, reports, policy):
    found = report["mixed_precision"][policy]
    assert found["dtype"] == "float32"
    assert found["finite"] == [True, policy == "mixed_bfloat16", True]
    assert 0.1 < found["norm"] < 100


def test_evaluation_equals_keras(report):
    logs, expected = report["evaluation"]
    assert logs == pytest.approx(expected, rel=1e-5)


def test_prediction_equals_keras(report):
    found, tried, expected = report["prediction"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tried, expected, rtol=1e-5, atol=1e-6)


def test_a_prepared_batch_knows_its_samples_also_if_it_is_sparse(report):
    found = report["prepared"]
    assert set(found["samples"]) == {8} != {found["elements"]}


def test_a_model_beyond_its_configuration_arrives_by_value(report):
    assert report["by_value"] == {"by_value": True, "extra": 2}


def test_a_train_step_of_the_script_runs_and_must_apply_one_gradient(report):
    found = report["refusals"]
    assert found["own"] > 0
    assert "there is no gradient to send" in found["none"]
    assert "twice" in found["twice"]


@pytest.mark.parametrize("loss", loss_cases.CASES)
def test_the_gradients_of_parts_combine_by_their_denominators_to_that_of_the_batch(report, loss):
    union, whole = report["unions"][loss]["gradients"]
    assert np.max(np.abs(whole)) > 1e-3
    np.testing.assert_allclose(union, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "kind"), [("mean", "None"), ("weighted", "None"), ("mean by no weights", "None"), ("sum", "inf")]
)
def test_losses_that_count_nothing_have_no_number_as_their_denominator(report, loss, kind):
    assert report["unions"][loss]["denominators"] == [kind] * 2


@pytest.mark.parametrize("loss", ["sum", "sum, with a regularizer", "mean", "weighted"])
def test_the_metric_loss_of_parts_is_that_of_the_batch(report, loss):
    parts, whole = report["unions"][loss]["losses"]
    assert parts == pytest.approx(whole, rel=1e-5)


def test_all_backends_compute_the_same_gradients_of_one_program(reports):
    first, *others = [report["exchange"] for report in reports.values()]
    for other in others:
        for mine, theirs in zip(first["gradients"], other["gradients"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        for mine, theirs in zip(first["untrained"], other["untrained"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
