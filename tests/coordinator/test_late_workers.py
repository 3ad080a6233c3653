"""Lateness of workers, from measured steps."""

import pytest

from nfdt.consistency import make_policy
from nfdt.coordinator.decisions import Decisions
from nfdt.coordinator.membership import Membership
from nfdt.core.work.instructions import TaskTime
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import PlannedTasks
from nfdt.schedulers.tasks import TaskPlan
from tests.support.simulated_cluster import job

A, B = "worker-0", "worker-1"


def decisions_of(samples, **overrides):
    spec = job(workers=2, samples=samples, batch_size=1, overrides=overrides)
    return Decisions(spec, make_policy(spec.algorithm))


def test_a_step_takes_its_exchange_too():
    parts = decisions_of(10)
    for _ in range(10):
        parts.speeds.stepped(A, 1, TaskTime(0.1, 0.3))
    described = parts.speeds.describe([A])[A]
    assert described["step_s"] == pytest.approx(0.4)
    assert described["step_exchange_s"] == pytest.approx(0.3)


@pytest.mark.parametrize(("late_s", "gets"), [(0.0, 0), (20.0, 1)])
def test_a_late_worker_may_be_late_for_as_long_again(late_s, gets):
    parts = decisions_of(2, tasks="finish-together")
    members = Membership(2, 0.0)
    slow, quick = members.join(A, 0, 0.0), members.join(B, 1, 0.0)
    for member in (slow, quick):
        members.set_ready(member)
    for _ in range(10):
        parts.speeds.stepped(A, 1, TaskTime(10.0))
        parts.speeds.stepped(B, 1, TaskTime(1.0))
    book = LeaseBook(PlannedTasks(TaskPlan(2, 1)))
    book.issue(B)
    quick.leased_at, now = 0.0, 1.0 + late_s
    slow.leased_at = now
    quick.seen_at = slow.seen_at = now
    assert parts.leases.size(slow, members.ready(), book, now) == gets
