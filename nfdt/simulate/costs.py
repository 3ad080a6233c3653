"""Conversion of a described cluster to the planner's cost model."""

from __future__ import annotations

from nfdt.planning import Cluster, SharedLink, WorkerCost
from nfdt.simulate.cluster import ClusterDescription, LinkDescription
from nfdt.simulate.machines import Machine, VirtualNetwork


def costs_of(cluster: ClusterDescription, batch_size: int, weights: int) -> Cluster:
    """Return the seconds of a step, a push with its reply and an allreduce.

    Args:
        cluster: The description; drift, pauses and failures are ignored.
        batch_size: Samples of the script's batch.
        weights: Elements of the model, sent as float32.
    """
    size, described = 4 * weights, cluster.each()
    apply_s = cluster.shards.apply_s
    workers = []
    for number, worker in enumerate(described):
        links: list[LinkDescription] = [worker, cluster.shards]
        if worker.link is not None:
            links.append(cluster.links[worker.link])
        there_and_back_s = 2 * sum(link.latency_ms for link in links) / 1000
        travel_s = 2 * size * max(_s_per_byte(link) for link in links)
        step = Machine(number, worker, batch_size, cluster.seed).step
        exchange_s = there_and_back_s + travel_s + apply_s
        cost = WorkerCost(f"worker-{number}", step, exchange_s, worker.jitter, travel_s, there_and_back_s)
        workers.append(cost)
    shared = [SharedLink(size / cluster.shards.count * _s_per_byte(cluster.shards), frozenset(range(len(described))))]
    for name, link in cluster.links.items():
        members = frozenset(number for number, worker in enumerate(described) if worker.link == name)
        shared.append(SharedLink(size * _s_per_byte(link), members))
    network = VirtualNetwork(cluster, 1)
    busy = tuple(link for link in shared if link.busy_s and link.workers)
    allreduce_s = network.allreduce_s(described, size)
    return Cluster(tuple(workers), batch_size, apply_s, allreduce_s, busy, network.rings(size))


def _s_per_byte(link: LinkDescription) -> float:
    return 8e-6 / link.bandwidth_mbit if link.bandwidth_mbit else 0.0
