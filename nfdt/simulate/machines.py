"""Simulated machines and links: how long gradients and bytes take, and which machines one worker has.

Times are virtual seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nfdt.coordinator.online_planner import ShardLoad
from nfdt.planning.cost_model import Cluster, SharedLink, WorkerCost
from nfdt.schedulers.ring_network import ONE_MACHINE, RingLink, RingNetwork
from nfdt.schedulers.throughput import StepTime
from nfdt.simulate.cluster import ClusterDescription, LinkDescription, Workers


class Machine:
    """One worker's machine. Its step times depend on the seed, its number and the time only, not on training results.

    Args:
        number: Number of the worker.
        described: Description of the worker.
        batch_size: Samples of the batch that ``step_ms`` refers to.
        seed: Seed of the cluster.
    """

    def __init__(self, number: int, described: Workers, batch_size: int, seed: int) -> None:
        assert described.step_ms is not None, "the description has been measured"
        self.number, self.described = number, described
        alpha_s = described.overhead_ms / 1000
        self.step = StepTime(alpha_s, (described.step_ms / 1000 - alpha_s) / batch_size)
        self._random = np.random.default_rng((seed, number))

    def seconds(self, samples: int, now: float) -> float:
        """Return the seconds of a gradient that begins at ``now``; draws the machine's next random number."""
        seconds = self.step.seconds(samples) * self._slowdown(now)
        if sigma := self.described.jitter:
            seconds *= math.exp(sigma * float(self._random.standard_normal()) - sigma * sigma / 2)
        return seconds + self._standing(now, seconds)

    def _slowdown(self, now: float) -> float:
        return next((d.slowdown for d in reversed(self.described.drift) if d.at_s <= now), 1.0)

    def _standing(self, now: float, seconds: float) -> float:
        """Return the seconds of pauses during a step."""
        stood = 0.0
        for pause in sorted(self.described.pauses, key=lambda p: p.at_s):
            if pause.at_s + pause.seconds > now and pause.at_s < now + seconds + stood:
                stood += pause.at_s + pause.seconds - max(now, pause.at_s)
        return stood


@dataclass
class VirtualLane:
    """One direction of a link: a message begins after the previous one has left.

    Attributes:
        s_per_byte: Seconds of a byte; 0: not limited.
        free_at: Time at which the last message has left.
    """

    s_per_byte: float = 0.0
    free_at: float = 0.0


class Road:
    """One worker's path to every shard, in one direction: its own lane, a shared one, and that of each shard.

    A message leaves when all lanes of its path are free, is sent at the rate of the slowest lane, and arrives after the
    latency.

    Args:
        lanes: Lanes of every message.
        shards: Lane of each shard.
        latency_s: Latency of the whole path, in seconds.
    """

    def __init__(self, lanes: Sequence[VirtualLane], shards: Sequence[VirtualLane], latency_s: float) -> None:
        limited = [[lane for lane in (*lanes, shard) if lane.s_per_byte] for shard in shards]
        self._ways = [(way, max((lane.s_per_byte for lane in way), default=0.0)) for way in limited]
        self.latency_s = latency_s

    def send(self, now: float, sizes: Sequence[int]) -> float:
        """Return the arrival time of the last of the messages, one per shard with its size in bytes.

        An empty message does not wait: its packet fits between those of a large message.
        """
        arrived = now
        for (lanes, s_per_byte), size in zip(self._ways, sizes, strict=True):
            if not size:
                continue
            begins = max([now, *(lane.free_at for lane in lanes)])
            arrived = max(arrived, begins + size * s_per_byte)
            for lane in lanes:
                lane.free_at = begins + size * lane.s_per_byte
        return arrived + self.latency_s


class VirtualNetwork:
    """All links of a cluster, and the shards at their end.

    Args:
        cluster: Description of the links and shards.
        shards: Actual number of shards.
        ring: Whether the workers exchange everything by allreduce; the path to the shards then costs nothing.
    """

    def __init__(self, cluster: ClusterDescription, shards: int, *, ring: bool = False) -> None:
        self._cluster, self._ring = cluster, ring
        self._shared = {name: _both(link) for name, link in cluster.links.items()}
        self._shards = [_both(cluster.shards) for _ in range(shards)]
        self._busy_until = 0.0
        self._pushes, self._waited_s = 0, 0.0
        self.apply_s = 0.0 if ring else cluster.shards.apply_s

    def roads(self, described: Workers) -> tuple[Road, Road]:
        """Return the paths of a worker with this description: to the shards, and back."""
        if self._ring:
            nothing = Road([VirtualLane()], [VirtualLane() for _ in self._shards], 0.0)
            return nothing, nothing
        links = [_both(described), *([self._shared[described.link]] if described.link is not None else [])]
        latency_s = sum(link.latency_ms for link in self._cluster.path(described)) / 1000
        up, down = (
            Road([link[way] for link in links], [shard[way] for shard in self._shards], latency_s) for way in (0, 1)
        )
        return up, down

    def applied(self, now: float) -> float:
        """Return the time at which the shards have applied a push that arrives at ``now``."""
        begins = max(now, self._busy_until)
        self._pushes, self._waited_s = self._pushes + 1, self._waited_s + begins - now
        self._busy_until = begins + self.apply_s
        return self._busy_until

    @property
    def load(self) -> ShardLoad:
        """Load that a push has put on a shard so far."""
        return ShardLoad(self.apply_s, self._waited_s / max(1, self._pushes))

    def allreduce_s(self, members: Sequence[Workers], size: int) -> float:
        """Return the seconds of a ring allreduce of ``size`` bytes among the members."""
        if len(members) < 2:
            return 0.0
        names = {member.machine for member in members}
        link = ONE_MACHINE if len(names) == 1 and "" not in names else self._ring_link(members)
        return link.allreduce_s(len(members), size)

    def rings(self, size: int) -> RingNetwork:
        """Return the machines of all workers and the cost of rings among them, for gradients of ``size`` bytes."""
        described = self._cluster.each()
        machines = tuple(worker.machine or f"worker-{number}" for number, worker in enumerate(described))
        if not any(worker.machine for worker in described):
            return RingNetwork(size=size)
        return RingNetwork(machines, size, between=self._ring_link(described))

    def _ring_link(self, members: Sequence[Workers]) -> RingLink:
        """Return the cost of a ring on the links of the members: that of the slowest."""
        links = [*members, *(self._cluster.links[m.link] for m in members if m.link is not None)]
        return RingLink(max(link.latency_ms for link in links) / 1000, max(link.s_per_byte for link in links))


def _both(link: LinkDescription) -> tuple[VirtualLane, VirtualLane]:
    return VirtualLane(link.s_per_byte), VirtualLane(link.s_per_byte)


@dataclass
class Post:
    """The machines of one worker of the coordinator, and its share of the job.

    Attributes:
        machines: Its machines, at least one.
        inside_s: Seconds to average a gradient among them.
        rows: Rows of a full step per machine; the rows of a task are split in this proportion.
        rate: Factor of the learning rate; None: that of the job.
        worker: Name of its current worker, or of its last one.
    """

    machines: tuple[Machine, ...]
    inside_s: float
    rows: tuple[int, ...]
    rate: float | None = None
    worker: str = ""

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of its machines."""
        return tuple(machine.number for machine in self.machines)


def costs_of(cluster: ClusterDescription, batch_size: int, size: int) -> Cluster:
    """Return the seconds of a step, a push with its reply and an allreduce.

    Args:
        cluster: The description; drift, pauses and failures are ignored.
        batch_size: Samples of the script's batch.
        size: Bytes of a push, and of the reply to it.
    """
    described = cluster.each()
    apply_s = cluster.shards.apply_s
    workers = []
    for number, worker in enumerate(described):
        links = cluster.path(worker)
        there_and_back_s = 2 * sum(link.latency_ms for link in links) / 1000
        travel_s = 2 * size * max(link.s_per_byte for link in links)
        step = Machine(number, worker, batch_size, cluster.seed).step
        exchange_s = there_and_back_s + travel_s + apply_s
        cost = WorkerCost(f"worker-{number}", step, exchange_s, worker.jitter, travel_s, there_and_back_s)
        workers.append(cost)
    shared = [SharedLink(size / cluster.shards.count * cluster.shards.s_per_byte, frozenset(range(len(described))))]
    for name, link in cluster.links.items():
        members = frozenset(number for number, worker in enumerate(described) if worker.link == name)
        shared.append(SharedLink(size * link.s_per_byte, members))
    network = VirtualNetwork(cluster, 1)
    busy = tuple(link for link in shared if link.busy_s and link.workers)
    allreduce_s = network.allreduce_s(described, size)
    return Cluster(tuple(workers), batch_size, apply_s, allreduce_s, busy, network.rings(size))
