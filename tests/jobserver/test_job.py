"""What a run does about workers that are gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.jobserver.job import ALONE_S, JobRun


class Lonely:
    """As much of a run as looks after lost workers; nobody takes their place."""

    def __init__(self) -> None:
        self.living: list[str] = []
        self.failures: list[str] = []
        self.groups = None
        self.spec = SimpleNamespace(cluster=SimpleNamespace(workers=1), algorithm=SimpleNamespace(topology="flat"))
        self.slots = SimpleNamespace(
            living=lambda: self.living, acquire_workers=lambda count: [], accepts=None, may_join=0, last_death=None
        )
        self._server = SimpleNamespace(pool=SimpleNamespace(attending=lambda role, accepts: (0, 0)))
        self._alone_since = None
        self.parts = SimpleNamespace(coordinator=SimpleNamespace(fail=self.failures.append))

    def _tell_launch_failure(self) -> str:
        return ""

    def _seat_workers(self, parts, job_slots) -> None:
        assert job_slots == []

    def at(self, now: float) -> list[str]:
        JobRun._replace_lost(self, self.parts, now)
        return self.failures


@pytest.fixture
def run(monkeypatch) -> Lonely:
    monkeypatch.setattr("nfdt.jobserver.job.slots_of", lambda spec: spec.cluster.workers)
    return Lonely()


def test_a_job_whose_workers_are_all_gone_fails_after_a_while(run):
    assert run.at(0.0) == []
    assert run.at(ALONE_S) == []
    assert "All workers are gone" in run.at(ALONE_S + 1)[0]


def test_a_worker_that_came_meanwhile_starts_the_time_anew(run):
    run.at(0.0)
    run.living = ["worker-1"]
    run.at(1.0)
    run.living = []
    assert run.at(ALONE_S + 1) == []
    assert run.at(2 * ALONE_S + 1) == []
    assert run.at(2 * ALONE_S + 2) != []
