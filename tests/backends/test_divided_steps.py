"""Steps on four devices, which are parts of a processor: the gradients of one device, and parts of variables."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.scripts import environment

DEADLINE_S = 500  # of one backend, on a busy machine
pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(3 * DEADLINE_S)]
FLOAT = 2e-6


@pytest.fixture(scope="module", params=["jax", "tensorflow"])
def report(request):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.divided_steps"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(KERAS_BACKEND=request.param),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_a_divided_batch_has_the_gradient_of_the_whole(report):
    backend, found = report
    assert found["devices"] == [f"cpu:{number}" for number in range(4)]
    exact = {name: case for name, case in found["divided"].items() if backend == "jax" or name != "normalized"}
    assert exact.keys() >= {"mean", "sum"}
    for name, case in exact.items():
        assert case["gradient"] < FLOAT, name
        assert case["logs"] < FLOAT, name
        assert case["untrained"] < FLOAT, name
        assert case["same kind"], name


def test_batchnorm_on_tensorflow_has_the_statistics_of_each_device(report):
    backend, found = report
    case = found["divided"]["normalized"]
    assert (case["gradient"] > 1e-3) == (backend == "tensorflow")
    assert case["untrained"] < 0.01


def test_each_device_has_its_part_of_a_variable_and_the_step_is_that_of_one_device(report):
    backend, found = report
    if backend != "jax":
        assert "sharded" not in found
        return
    sharded = found["sharded"]
    assert sharded["unpacked"] == 0
    whole = 20 * 64 * 4
    assert sharded["bytes"]["kernel"] == sharded["local bytes"] == [whole, *[whole // 2] * 4]
    assert sharded["bytes"]["bias"] == [64 * 4] * 5
    assert sharded["step"]["gradient"] < FLOAT
    assert sharded["step"]["untrained"] < FLOAT
    assert sharded["local"] < FLOAT
