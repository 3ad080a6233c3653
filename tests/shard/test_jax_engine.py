"""Shards on JAX, as the simulator has them where the model is on JAX: they equal Keras' optimizer alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.scripts import environment


@pytest.mark.processes
def test_shards_on_jax_equal_keras():
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.jax_shard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment(KERAS_BACKEND="jax"))
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.pop("backend") == "jax"
    assert set(report) == {"plain", "ddc", "dc-a"}
    assert max(report.values()) < 1e-5
