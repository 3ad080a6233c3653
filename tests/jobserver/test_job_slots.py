"""When workers that die as fast as they come end a job."""

from types import SimpleNamespace

import pytest

from nfdt.core.clock import ManualClock
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_slots import QUICK_DEATHS, QUICK_S, Crew
from nfdt.jobserver.slot_pool import SlotPool
from tests.support.simulated_cluster import job

HOW = "its process was ended by SIGKILL"


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def crew(clock):
    pool = SlotPool()
    for number in range(20):
        pool.join(pb.SlotHello(name=f"slot-{number}", role="worker"))
    site = SimpleNamespace(pool=pool, clock=clock, is_here=lambda hello: False)
    return Crew(site, "job-1", job(workers=2), "", "token", lambda *news: None)


def join(crew, count=1):
    seats = crew.recruit_workers(count)
    for seat in seats:
        crew.start_worker(seat, 0)
    return seats if count > 1 else seats[0]


def die(crew, seat) -> bool:
    seat.gone = True
    return crew.died(seat, HOW)


def test_a_row_of_quick_deaths_ends_the_job_and_the_last_one_is_named(crew):
    deaths = [die(crew, join(crew)) for _ in range(QUICK_DEATHS)]
    assert deaths == [False] * (QUICK_DEATHS - 1) + [True]
    assert crew.last_death == f"worker-{QUICK_DEATHS - 1} is lost: {HOW}"


def test_somebody_who_was_there_before_goes_on_alone(crew):
    first, other = join(crew, 2)
    assert not any([die(crew, first), *(die(crew, join(crew)) for _ in range(2 * QUICK_DEATHS))])
    assert die(crew, other)


def test_a_worker_that_worked_for_some_time_begins_the_count_anew(crew, clock):
    die(crew, join(crew))
    die(crew, join(crew))
    worked = join(crew)
    worked.report = {"steps": 1}
    clock.advance(QUICK_S)
    assert not die(crew, worked)
    assert not die(crew, join(crew))


def test_a_worker_that_is_slow_to_its_first_step_has_died_quickly(crew, clock):
    deaths = []
    for _ in range(QUICK_DEATHS):
        seat = join(crew)
        clock.advance(100 * QUICK_S)
        deaths.append(die(crew, seat))
    assert deaths[-1]
