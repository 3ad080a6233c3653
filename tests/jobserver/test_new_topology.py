"""Topology that is added in one file and trains a job."""

from __future__ import annotations

from typing import ClassVar

import pytest

from nfdt.coordinator.topology_view import FlatView
from nfdt.core.errors import JobFailed
from nfdt.core.specs.presets import AXES, TOPOLOGY_FACTS, TopologyFacts
from nfdt.core.wire import workers_pb2
from nfdt.jobserver.topologies import TOPOLOGIES
from nfdt.jobserver.topologies.base import Topology
from tests.support.fakes import of

NAME = "pairs"


class PairsView(FlatView):
    """View in which every registered worker stands for a pair of workers."""

    def slots_wanted(self, spec):
        return spec.cluster.workers // 2

    def effective_spec(self, spec, *, groups=1, ranks=None):
        fit = spec.fit.model_copy(update={"batch_size": 2 * spec.fit.batch_size})
        return spec.model_copy(update={"fit": fit})


class PairsTopology(Topology):
    """Topology of pairs whose members divide each batch, and are not replaced."""

    view: ClassVar = PairsView()

    def start(self, shards):
        pass

    def give_up(self, short, *, late):
        if late:
            raise JobFailed("The pairs did not come up.")

    def replace_lost(self, coordinator, now):
        if not self.parts.slots.living():
            coordinator.fail("All pairs are gone.")

    def share(self, worker):
        return workers_pb2.GroupShare(rows=[self.spec.fit.batch_size] * 2, rate=1.0)


@pytest.fixture
def topology(monkeypatch) -> str:
    monkeypatch.setitem(TOPOLOGIES, NAME, PairsTopology)
    monkeypatch.setitem(TOPOLOGY_FACTS, NAME, TopologyFacts())
    monkeypatch.setitem(AXES, "topology", (*AXES["topology"], NAME))
    return NAME


def spec_of(client, topology, **fields):
    algorithm = {"name": "asgd", "update_rule": "plain", "topology": topology}
    return client.spec(epochs=2, workers=4, samples=40, algorithm=algorithm, **fields)


def test_a_new_topology_trains_a_job(topology, start, cluster):
    client = start(workers=3, shards=1)
    job = client.submit(spec_of(client, topology))
    events = client.finish(job)
    assert events[-1][1]["state"] == "succeeded"
    assert [event["steps"] for event in of(events, "epoch_begin")] == [5, 5]
    assert len(of(events, "worker_joined")) == 2
    assert sum(len(slot.trained) for slot in cluster.slots) == 10


def test_a_new_topology_decides_how_a_job_fails(topology, start):
    client = start(shards=1)
    job = client.submit(spec_of(client, topology, start_timeout_s=0.1))
    assert client.finish(job)[-1][1]["reason"] == "The pairs did not come up."
