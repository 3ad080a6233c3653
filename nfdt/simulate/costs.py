"""A described cluster as the planner's cost model sees it."""

from __future__ import annotations

from nfdt.planning import Cluster, WorkerCost
from nfdt.simulate.cluster import ClusterDescription, Link
from nfdt.simulate.machines import Machine, Network


def costs_of(cluster: ClusterDescription, batch_size: int, weights: int) -> Cluster:
    """What a step, a push with its reply and an allreduce take.

    Args:
        cluster: As described; drift, pauses and failures are left out.
        batch_size: Samples of the script's batch.
        weights: Elements of the model, which travel as float32.
    """
    size, described = 4 * weights, cluster.each()
    apply_s = cluster.shards.apply_s
    workers = []
    for number, worker in enumerate(described):
        links: list[Link] = [worker, cluster.shards]
        if worker.link is not None:
            links.append(cluster.links[worker.link])
        latency_s = sum(link.latency_ms for link in links) / 1000
        travel_s = size * max(_s_per_byte(link) for link in links)
        step = Machine(number, worker, batch_size, cluster.seed).step
        workers.append(WorkerCost(f"worker-{number}", step, 2 * (latency_s + travel_s) + apply_s, worker.jitter))
    # A shard's own bytes in one direction, or its step, whichever is longer, keeps the next push waiting.
    busy_s = max(apply_s, size / cluster.shards.count * _s_per_byte(cluster.shards))
    allreduce_s = Network(cluster, 1).allreduce_s(described, size)
    return Cluster(tuple(workers), batch_size, busy_s, allreduce_s)


def _s_per_byte(link: Link) -> float:
    return 8e-6 / link.bandwidth_mbit if link.bandwidth_mbit else 0.0
