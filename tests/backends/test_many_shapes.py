"""Batches of many sizes on JAX, in a process whose memory maps run out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.many_shapes import SIZES
from tests.support.scripts import environment

DEADLINE_S = 300  # on a busy machine
pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * DEADLINE_S)]


def test_what_is_compiled_for_a_batch_size_is_dropped_before_memory_maps_run_out():
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.many_shapes"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(KERAS_BACKEND="jax")
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    assert f"{SIZES} sizes" in done.stdout
