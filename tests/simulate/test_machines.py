import numpy as np
import pytest

from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.schedulers.ring_network import ONE_MACHINE
from nfdt.simulate.cluster import Workers, parse_cluster
from nfdt.simulate.machines import Machine, Road, VirtualLane, VirtualNetwork
from nfdt.simulate.post_plan import PostPlan

MBIT_BYTE = 8e-6  # seconds of a byte at 1 Mbit/s


def machine(number=0, seed=0, **described):
    return Machine(number, Workers(**{"step_ms": 100, **described}), 10, seed)


def test_a_step_takes_what_is_described_and_in_proportion_to_its_samples():
    assert machine().seconds(10, 0.0) == pytest.approx(0.1)
    assert machine().seconds(5, 0.0) == pytest.approx(0.05)
    assert machine(overhead_ms=20).seconds(5, 0.0) == pytest.approx(0.06)


def test_jitter_has_mean_one_and_depends_on_seed_and_number_alone():
    steps = [machine(jitter=0.3).seconds(10, 0.0) for _ in range(2)]
    assert steps[0] == steps[1]
    assert steps[0] != machine(number=1, jitter=0.3).seconds(10, 0.0)
    drawn = machine(jitter=0.3)
    assert np.mean([drawn.seconds(10, 0.0) for _ in range(4000)]) == pytest.approx(0.1, rel=0.03)


def test_drift_counts_from_its_moment_on():
    slower = machine(drift=[{"at_s": 5, "slowdown": 2}, {"at_s": 9, "slowdown": 3}])
    assert [slower.seconds(10, now) for now in (4.9, 5.0, 20.0)] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(("now", "expected"), [(0.0, 0.1), (0.95, 2.1), (1.5, 1.6), (3.0, 0.1)])
def test_a_pause_is_waited_for(now, expected):
    assert machine(pauses=[{"at_s": 1, "seconds": 2}]).seconds(10, now) == pytest.approx(expected)


def test_messages_on_a_link_follow_each_other():
    lane = VirtualLane(1e-6)  # a million bytes per second
    road = Road([lane], [VirtualLane()], latency_s=0.5)
    assert road.send(0.0, [1_000_000]) == pytest.approx(1.5)
    assert road.send(0.25, [1_000_000]) == pytest.approx(2.5)
    assert road.send(9.0, [0]) == pytest.approx(9.5)


def test_workers_share_the_link_of_a_shard_and_a_shard_applies_one_push_after_the_other():
    described = parse_cluster(
        {"workers": [{"step_ms": 1, "count": 2}], "shards": {"bandwidth_mbit": 8, "apply_ms": 100}}
    )
    network = VirtualNetwork(described, 1)
    ups = [network.roads(worker)[0] for worker in described.each()]
    assert [up.send(0.0, [1_000_000]) for up in ups] == pytest.approx([1.0, 2.0])
    assert [network.applied(at) for at in (1.0, 1.05, 2.0)] == pytest.approx([1.1, 1.2, 2.1])


def test_an_allreduce_is_a_ring_s():
    described = parse_cluster({"workers": [{"step_ms": 1, "count": 4, "bandwidth_mbit": 100, "latency_ms": 1}]})
    network = VirtualNetwork(described, 1)
    assert network.allreduce_s(described.each(), 1000) == pytest.approx(6 * 1e-3 + 1.5 * 1000 * MBIT_BYTE / 100)
    assert network.allreduce_s(described.each()[:1], 1000) == 0.0


def test_a_ring_on_one_machine_does_not_use_its_link():
    table = {"step_ms": 1, "count": 2, "bandwidth_mbit": 1, "latency_ms": 9}
    described = parse_cluster({"workers": [{**table, "machine": "a"}, {**table, "machine": "b"}]})
    network, workers = VirtualNetwork(described, 1), described.each()
    assert network.allreduce_s(workers[:2], 1000) == ONE_MACHINE.allreduce_s(2, 1000)
    assert network.allreduce_s(workers[1:3], 1000) == pytest.approx(2 * 9e-3 + 1000 * MBIT_BYTE)
    rings = network.rings(1000)
    assert rings.machines == ("a", "a", "b", "b")
    assert rings.allreduce_s((1, 2)) == pytest.approx(network.allreduce_s(workers[1:3], 1000))


def test_machines_without_names_are_grouped_by_speed_alone():
    described = parse_cluster({"workers": [{"step_ms": 1, "count": 2, "bandwidth_mbit": 1}]})
    assert not VirtualNetwork(described, 1).rings(1000).several


@pytest.mark.parametrize(("names", "members"), [(("a", "b"), [(0, 1), (2, 3)]), (("", ""), [(0, 1, 2, 3)])])
def test_groups_keep_to_their_machines_where_links_are_slow(names, members):
    described = parse_cluster(
        {"workers": [{"step_ms": 100, "count": 2, "latency_ms": 30, "machine": name} for name in names]}
    )
    machines = [Machine(number, worker, 10, 0) for number, worker in enumerate(described.each())]
    spec = JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("group-sync"),
        cluster=ClusterSpec(workers=4),
        fit=FitSpec(epochs=1, batch_size=10),
        train=DataSpec(kind="arrays", samples=1000),
    )
    plan = PostPlan(spec, machines, VirtualNetwork(described, 1), 1000)
    assert [post.members for post in plan.posts] == members
