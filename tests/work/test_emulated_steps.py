"""The steps of a worker under ``emulate``: their duration, and the end of the process at one of them."""

import os
import signal

import pytest

from nfdt.core.specs.job import DataSpec, FitSpec, JobSpec, resolve_algorithm, resolve_cluster
from nfdt.core.work.emulated_steps import EmulatedSteps


def emulated(number: int, wait=lambda seconds: None, **emulate) -> EmulatedSteps:
    spec = JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("asgd"),
        cluster=resolve_cluster(workers=3, emulate=emulate),
        fit=FitSpec(epochs=1, batch_size=64),
        train=DataSpec(kind="arrays", samples=640),
    )
    return EmulatedSteps(spec, number, f"worker-{number}", wait)


def test_a_step_waits_for_the_rest_of_its_emulated_time():
    waits: list[float] = []
    steps = emulated(1, waits.append, step_ms=(0, 80, 0))
    steps.finish(1, 0.03, 64)
    assert steps.lengthen(0.03, 32) == pytest.approx(0.04)
    assert waits == pytest.approx([0.05, 0.01])


def test_a_step_that_is_slow_enough_does_not_wait():
    waits: list[float] = []
    assert emulated(0, waits.append, step_ms=(20,)).lengthen(0.03, 64) == 0.03
    assert waits == []


def test_a_process_is_killed_at_its_scripted_steps_only(monkeypatch):
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: kills.append(call))
    for number in range(3):
        steps = emulated(number, fail="1@5,2@60,1@7")
        for step in range(10):
            before = len(kills)
            steps.finish(step, 0.01, 64)
            assert (len(kills) > before) == (number == 1 and step in (5, 7))
    assert kills == [(os.getpid(), signal.SIGKILL)] * 2


@pytest.mark.parametrize("emulate", [{"slowdown": 2}, {"step_ms": (0, 5, 0)}, {"fail": "1@3"}])
def test_only_options_about_steps_make_them_timed(emulate):
    assert emulated(0, **emulate).active
    assert not emulated(0, latency_ms=5).active
