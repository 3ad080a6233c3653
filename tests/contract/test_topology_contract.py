"""Promises of every registered topology."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import VIEWS, view_of
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.specs.presets import AXES, PRESETS
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.mailbox import Mailbox
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.jobserver.topologies import TOPOLOGIES, topology_class
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.slot_supply import SlotNeed
from tests.support.clocks import ManualClock

WORKERS, BATCH = 4, 32
HOOKS = [name for name, _ in inspect.getmembers(Topology, inspect.isfunction) if not name.startswith("_")]

every_topology = pytest.mark.parametrize("name", TOPOLOGIES)


def job(name: str, kind: str = "arrays") -> JobSpec:
    preset = next(preset for preset, choices in PRESETS.items() if choices["topology"] == name)
    return JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm(preset),
        cluster=ClusterSpec(workers=WORKERS),
        fit=FitSpec(epochs=2, batch_size=BATCH),
        train=DataSpec(kind=kind, samples=1000 if kind == "arrays" else None),
    )


class Rings:
    """Launcher whose rings never start, and never fail."""

    in_slots, spans_machines, machines = False, True, ()

    def place(self, groups, *, together):
        return True

    def claim(self, shape):
        return SimpleNamespace(
            name="ring-1",
            shape=shape,
            origin="mpirun",
            log="ring.log",
            failure=None,
            awaited_slots=0,
            messages=lambda: ([], []),
        )


class Log(list):
    def write(self, level, text):
        self.append(text)


def make(name: str) -> Topology:
    """Return the topology of a job that waits for its slots."""
    server = SimpleNamespace(rings=Rings(), launcher=None, launches_workers=False, pool=SlotPool(), clock=ManualClock())
    spec = job(name)
    kind = topology_class(spec)
    slots = JobSlots(server, "job", spec, "", "token", kind.view.slots_wanted(spec))
    return kind(JobParts(server, "job", slots, Log(), set(), Rings(), Mailbox(server.clock), None), spec)


def test_every_choice_of_the_axis_is_registered():
    assert set(AXES["topology"]) == set(TOPOLOGIES) == set(VIEWS)
    assert all(TOPOLOGIES[name].view is VIEWS[name] for name in TOPOLOGIES)


@every_topology
def test_a_topology_has_the_hooks_of_the_protocol(name):
    for hook in HOOKS:
        wanted = list(inspect.signature(getattr(Topology, hook)).parameters)
        assert list(inspect.signature(getattr(TOPOLOGIES[name], hook)).parameters) == wanted, hook


@every_topology
@pytest.mark.parametrize("groups", [1, 2, WORKERS])
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_the_coordinator_s_workers_have_the_batches_of_all_workers_together(name, groups, kind):
    spec = job(name, kind)
    seen = view_of(spec).effective_spec(spec, groups=groups)
    if kind == "arrays":
        assert seen.cluster.workers * seen.fit.batch_size >= WORKERS * BATCH
    else:
        assert seen.fit.batch_size == BATCH
    assert (seen.algorithm, seen.train, seen.fit.epochs) == (spec.algorithm, spec.train, spec.fit.epochs)


@every_topology
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_the_coordinator_s_policy_lets_a_single_worker_begin(name, kind):
    spec = job(name, kind)
    policy = view_of(spec).policy(spec)
    policy.joined("worker-0")
    assert policy.may_start("worker-0")
    assert policy.round_parts(1) >= 1


@every_topology
def test_a_job_takes_at_most_one_slot_per_worker_from_the_pool(name):
    view, spec = TOPOLOGIES[name].view, job(name)
    assert 0 <= view.slots_wanted(spec) <= WORKERS
    assert view.launched or view.slots_wanted(spec) == WORKERS


@every_topology
def test_a_start_can_be_repeated_while_slots_are_missing(name):
    topology = make(name)
    topology.start(1)
    lines = list(topology.parts.job_log)
    topology.start(1)
    assert topology.parts.job_log == lines
    topology.give_up([], late=False)


@every_topology
def test_a_start_that_takes_too_long_fails_the_job(name):
    topology = make(name)
    topology.start(1)
    with pytest.raises(JobFailed, match=r"within|after"):
        topology.give_up([SlotNeed("shard", 1, 0, 0)], late=True)


@every_topology
def test_a_job_without_other_processes_has_the_defaults(name):
    topology, error = make(name), ValueError("bug")
    lost = JobSlot(SimpleNamespace(), "worker-0", 0)
    assert topology.explain(error) is error
    assert not topology.lost(lost, "it was killed")
    assert not lost.failing_over
    assert topology.prepare_epoch(SimpleNamespace())
    flushed = []
    shards = SimpleNamespace(flush=lambda: flushed.append(True))
    coordinator = Coordinator(topology.spec, topology.view.policy(topology.spec), ManualClock())
    topology.parts.connect_shards = lambda: shards
    topology.connect(coordinator).flush()
    assert flushed == [True]
    assert (topology.recovery is not None) == topology.restores
    topology.report()
    topology.close()
    topology.close()


@every_topology
def test_the_coordinator_begins_with_the_workers_that_are_there(name):
    topology = make(name)
    assert topology.coordinator_spec().cluster.workers == 1
    slots = topology.parts.slots
    for number in range(2):
        slots.workers[f"worker-{number}"] = JobSlot(SimpleNamespace(), f"worker-{number}", number)
    assert topology.coordinator_spec().cluster.workers == 2
