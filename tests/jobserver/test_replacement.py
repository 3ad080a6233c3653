"""Replacement of workers that are gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.jobserver.topologies.replacement import ALONE_S, WorkerReplacement


class Lonely:
    """Job without workers, whose lost workers are not replaced."""

    def __init__(self) -> None:
        self.living: list[str] = []
        self.failures: list[str] = []
        slots = SimpleNamespace(
            living=lambda: self.living,
            acquire_workers=lambda count: [],
            admit=lambda job_slots, coordinator: None,
            accepts=None,
            may_join=0,
            last_death=None,
        )
        pool = SimpleNamespace(attending=lambda role, accepts: (0, 0))
        server = SimpleNamespace(pool=pool, launcher=None, launches_workers=False)
        self._replacement = WorkerReplacement(SimpleNamespace(server=server, slots=slots, job_log=None), wanted=1)

    def at(self, now: float) -> list[str]:
        self._replacement.replace_lost(SimpleNamespace(fail=self.failures.append), now)
        return self.failures


@pytest.fixture
def job() -> Lonely:
    return Lonely()


def test_a_job_whose_workers_are_all_gone_fails_after_a_while(job):
    assert job.at(0.0) == []
    assert job.at(ALONE_S) == []
    assert "All workers are gone" in job.at(ALONE_S + 1)[0]


def test_a_worker_that_came_meanwhile_starts_the_time_anew(job):
    job.at(0.0)
    job.living = ["worker-1"]
    job.at(1.0)
    job.living = []
    assert job.at(ALONE_S + 1) == []
    assert job.at(2 * ALONE_S + 1) == []
    assert job.at(2 * ALONE_S + 2) != []
