"""Replacement of workers that are gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.jobserver.topologies.slot_supply import ALONE_S, WorkerReplacement

PATIENCE_S = 120.0


class Lonely:
    """Job without workers, whose lost workers are not replaced."""

    def __init__(self, may_join: int = 1, failure: str = "") -> None:
        self.living: list[str] = []
        self.failures: list[str] = []
        slots = SimpleNamespace(
            living=lambda: self.living,
            acquire_workers=lambda count: [],
            admit=lambda job_slots, coordinator: None,
            accepts=None,
            may_join=may_join,
            last_death=None,
        )
        pool = SimpleNamespace(demand=0, attending=lambda role, accepts: (0, 0))
        launcher = SimpleNamespace(failure=failure)
        server = SimpleNamespace(pool=pool, launcher=launcher, launches_workers=bool(failure))
        log = SimpleNamespace(write=lambda level, message: None)
        context = SimpleNamespace(server=server, slots=slots, job_log=log)
        self._replacement = WorkerReplacement(context, wanted=1, patience_s=PATIENCE_S)

    def at(self, now: float) -> list[str]:
        self._replacement.replace_lost(SimpleNamespace(fail=self.failures.append), now)
        return self.failures


@pytest.mark.parametrize(
    ("job", "limit_s"),
    [(Lonely(), PATIENCE_S), (Lonely(may_join=0), ALONE_S), (Lonely(failure="no room"), ALONE_S)],
    ids=["others may register", "none may join", "none can be started"],
)
def test_a_job_whose_workers_are_all_gone_fails_after_a_while(job, limit_s):
    assert job.at(0.0) == []
    assert job.at(limit_s) == []
    assert "All workers are gone" in job.at(limit_s + 1)[0]


def test_a_worker_that_came_meanwhile_starts_the_time_anew():
    job = Lonely()
    job.at(0.0)
    job.living = ["worker-1"]
    job.at(1.0)
    job.living = []
    assert job.at(PATIENCE_S + 1) == []
    assert job.at(2 * PATIENCE_S + 1) == []
    assert job.at(2 * PATIENCE_S + 2) != []
