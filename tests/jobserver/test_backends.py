"""Worker slots that a job can use, by the backend of Keras in them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.core.errors import VersionMismatch
from nfdt.core.jobs.admission import check_versions
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.jobserver.topologies.slot_supply import launch_workers
from tests.support.clocks import ManualClock
from tests.support.simulated_cluster import job

VERSIONS = {"python": "3.11", "keras": "3.15.1", "tensorflow": "2.21.0", "jax": "0.10.2"}


def on(backend: str) -> dict[str, str]:
    return {**VERSIONS, "backend": backend}


class Launcher:
    def __init__(self):
        self.wanted = []

    def ensure(self, role, count, backend=""):
        self.wanted.append((role, count, backend))


@pytest.fixture
def make():
    def make(backend="tensorflow", *slots, launched=False, portable=True, code=False):
        pool = SlotPool()
        for number, name in enumerate(slots):
            pool.join(pb.SlotHello(name=f"{name}-{number}", role="worker", versions=on(name)))
        server = SimpleNamespace(
            pool=pool,
            clock=ManualClock(),
            launcher=Launcher() if launched else None,
            launches_workers=launched,
            most_workers=None,
            is_here=lambda hello: True,
            is_launched=lambda slot: launched,
        )
        spec = job(workers=len(slots) or 1).model_copy(update={"versions": on(backend), "code": code})
        return JobSlots(server, "job-1", spec, "", "token", len(slots), portable=portable), server

    return make


def names(taken) -> list[str]:
    return [job_slot.slot.name for job_slot in taken]


def test_slots_on_the_backend_of_the_script_come_first(make):
    slots, _ = make("tensorflow", "jax", "tensorflow", "torch", "tensorflow")
    assert names(slots.acquire_workers(3)) == ["tensorflow-1", "tensorflow-3", "jax-0"]


def test_a_job_with_code_takes_no_others(make):
    slots, _ = make("jax", "jax", "tensorflow", portable=False, code=True)
    assert names(slots.acquire_workers(2)) == ["jax-0"]


def test_it_is_said_why_slots_that_attend_are_of_no_use(make):
    slots, _ = make("jax", "jax", "tensorflow", "torch", portable=False)
    assert slots.unfit == (
        " (2 that attend cannot be used: there Keras runs on tensorflow or torch, and the job needs KERAS_BACKEND=jax)"
    )
    slots, server = make("jax", "jax", portable=False, code=True)
    assert slots.unfit == ""
    server.pool.join(pb.SlotHello(name="old", role="worker", versions={**on("jax"), "jax": "0.9.0"}))
    assert slots.unfit == " (1 that attends cannot be used: jax: client 0.10.2, worker 0.9.0)"


def test_a_slot_of_an_older_release_is_on_tensorflow(make):
    slots, server = make("tensorflow", portable=False)
    server.pool.join(pb.SlotHello(name="old", role="worker", versions={"python": "3.11"}))
    assert names(slots.acquire_workers(1)) == ["old"]


def test_slots_that_the_server_starts_are_replaced_by_others_on_the_backend(make):
    slots, server = make("jax", "tensorflow", "tensorflow", launched=True)
    assert slots.acquire_workers(2) == []
    launch_workers(server, slots.spec, 2)
    assert server.launcher.wanted == [("worker", 2, "jax")]
    assert server.pool.attending("worker") == (0, 0), "they are dismissed"
    server.pool.join(pb.SlotHello(name="new", role="worker", versions=on("jax")))
    launch_workers(server, slots.spec, 2)
    assert names(slots.acquire_workers(2)) == ["new"]


def test_a_slot_that_works_for_another_job_is_not_dismissed(make):
    slots, server = make("tensorflow", "tensorflow", launched=True)
    (working,) = slots.acquire_workers(1)
    launch_workers(server, slots.spec.model_copy(update={"versions": on("jax")}), 1)
    assert not working.slot.dismissed


def test_code_for_another_backend_is_refused_by_name(make):
    slots, _ = make("jax", code=True)
    with pytest.raises(VersionMismatch, match="backend: client jax, worker tensorflow"):
        check_versions(slots.spec, [on("tensorflow")])
    check_versions(slots.spec, [on("tensorflow"), on("jax")])


def test_code_for_jax_needs_its_version_of_jax_and_not_of_tensorflow(make):
    slots, _ = make("jax", code=True)
    check_versions(slots.spec, [{**on("jax"), "tensorflow": "2.20.0"}])
    with pytest.raises(VersionMismatch, match="jax: client 0.10.2, worker 0.9.0"):
        check_versions(slots.spec, [{**on("jax"), "jax": "0.9.0"}])
