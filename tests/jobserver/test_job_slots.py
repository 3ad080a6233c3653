"""End of a job whose workers die as fast as they start."""

from types import SimpleNamespace

import pytest

from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_slots import QUICK_DEATHS, QUICK_S, JobSlots
from nfdt.jobserver.slot_pool import SlotPool
from tests.support.clocks import ManualClock
from tests.support.simulated_cluster import job

HOW = "its process was ended by SIGKILL"


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def slots(clock):
    pool = SlotPool()
    for number in range(20):
        pool.join(pb.SlotHello(name=f"slot-{number}", role="worker"))
    server = SimpleNamespace(pool=pool, clock=clock, is_here=lambda hello: False)
    return JobSlots(server, "job-1", job(workers=2), "", "token", wanted=2)


def join(slots, count=1):
    job_slots = slots.acquire_workers(count)
    for job_slot in job_slots:
        slots.start_worker(job_slot, 0)
    return job_slots if count > 1 else job_slots[0]


def die(slots, job_slot) -> bool:
    job_slot.gone = True
    return slots.died(job_slot, HOW)


def test_a_row_of_quick_deaths_ends_the_job_and_the_last_one_is_named(slots):
    deaths = [die(slots, join(slots)) for _ in range(QUICK_DEATHS)]
    assert deaths == [False] * (QUICK_DEATHS - 1) + [True]
    assert slots.last_death == f"worker-{QUICK_DEATHS - 1} is lost: {HOW}"


def test_a_worker_that_was_there_before_goes_on_alone(slots):
    first, other = join(slots, 2)
    assert not any([die(slots, first), *(die(slots, join(slots)) for _ in range(2 * QUICK_DEATHS))])
    assert die(slots, other)


def test_a_worker_that_worked_for_some_time_begins_the_count_anew(slots, clock):
    die(slots, join(slots))
    die(slots, join(slots))
    worked = join(slots)
    worked.report = {"steps": 1}
    clock.advance(QUICK_S)
    assert not die(slots, worked)
    assert not die(slots, join(slots))


def test_a_worker_that_is_slow_to_its_first_step_has_died_quickly(slots, clock):
    deaths = []
    for _ in range(QUICK_DEATHS):
        job_slot = join(slots)
        clock.advance(100 * QUICK_S)
        deaths.append(die(slots, job_slot))
    assert deaths[-1]
