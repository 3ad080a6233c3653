"""Parts and settings of a server that all of its jobs share."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from nfdt.core.clock import Clock, SystemClock
from nfdt.core.host.machine import boot_id, memory
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import is_loopback
from nfdt.jobserver.capacity import Capacity
from nfdt.jobserver.pool_slot import PoolSlot
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.launch.horovod import RingLauncher
from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotEnd
from nfdt.launch.world_store import WorldStores
from nfdt.schedulers.job_queue import Quota

REAP_S = 2.0  # limit from the end of a slot's stream to that of its process


@dataclass(frozen=True)
class ServerContext:
    """Stores, slots and settings of a server, shared by its jobs.

    Attributes:
        store: Store of jobs and events.
        artifacts: Store of files.
        pool: Registered slots.
        launcher: Launcher of slots on this machine; None: all slots are external.
        rings: Launcher of Horovod rings; None: this server starts none.
        worlds: Rendezvous of the rings that are forming in worker slots.
        insecure_allreduce: Whether ranks on several machines may exchange gradients in plain text.
        launches_workers: Whether the launcher starts worker slots in addition to shards.
        most_workers: Maximum number of worker slots that it starts; None: as many as a job requests.
        embedded: Whether the server belongs to one script. Its jobs keep no checkpoints, are cancelled without their
            client instead of going on detached, and may name hosts for their rings. Ranks are launched, not slots.
        attend_timeout_s: Seconds for which a client may be gone.
        shard_host: Address of this machine at which workers reach its shards.
        tls: Whether the server, and so every shard that is not on loopback, uses TLS.
        insecure: Whether plain text on a network is allowed.
        quotas: Quotas of owners of jobs, by name.
        clock: Clock of the server.
        host: Name of this machine.
        boot: Boot identifier of this machine.
        cores: Number of cores that the server may use.
        memory_bytes: Memory of this machine.
    """

    store: JobStore
    artifacts: ArtifactStore
    pool: SlotPool
    launcher: LocalLauncher | None = None
    launches_workers: bool = False
    most_workers: int | None = None
    rings: RingLauncher | None = None
    worlds: WorldStores = field(default_factory=WorldStores)
    insecure_allreduce: bool = False
    embedded: bool = False
    attend_timeout_s: float = 60.0
    shard_host: str = "127.0.0.1"
    tls: bool = False
    insecure: bool = False
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot_id)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    memory_bytes: int = field(default_factory=lambda: memory().total)

    def capacity(self) -> Capacity:
        """Return the resources that this server can offer a job."""
        workers: int | None = None
        if self.launches_workers and self.most_workers is not None:
            workers = max(self.most_workers, self.pool.slot_counts().attending)
        offered, _ = self.pool.attending("shard", lambda slot: self.offers_shard(slot.hello))
        return Capacity(
            self.cores,
            self.memory_bytes,
            workers,
            local=self.launches_workers,
            offered_shards=offered,
            client=is_loopback(self.shard_host),
            disk_bytes=self.artifacts.room(),
            checkpoints=not self.embedded,
        )

    def accepts_shard(self, hello: pb.SlotHello) -> bool:
        """Whether workers reach a shard in this slot, over TLS unless plain text is allowed."""
        if not hello.address or is_loopback(hello.address):
            return is_loopback(self.shard_host) and (self.is_here(hello) or not hello.address)
        return not is_loopback(self.shard_host) and (self.tls or self.insecure)

    def offers_shard(self, hello: pb.SlotHello) -> bool:
        """Whether a slot of another machine can be a shard."""
        return bool(hello.address) and not self.is_here(hello) and self.accepts_shard(hello)

    def is_launched(self, slot: PoolSlot) -> bool:
        """Whether the launcher keeps the slots of this machine, and may replace this one."""
        return self.launches_workers and self.is_here(slot.hello)

    def is_here(self, hello: pb.SlotHello) -> bool:
        """Whether a slot runs on this machine, by its hello."""
        return hello.boot_id == self.boot and hello.host == self.host

    def kill(self, hello: pb.SlotHello) -> None:
        """Kill the process of a slot that does not answer, if this server started it."""
        if self.launcher is not None and hello.boot_id == self.boot and hello.pid in self.launcher.pids:
            os.kill(hello.pid, signal.SIGKILL)

    def end_of(self, hello: pb.SlotHello) -> str:
        """Return how the process of a slot ended, after waiting shortly for its exit code if this server started it."""
        return str(self._end_of(hello) or f"its process ended ({hello.pid} on {hello.host}, slot {hello.name})")

    def was_killed(self, hello: pb.SlotHello) -> bool:
        """Whether the process of a slot was killed, as where memory is short; False if this server did not start it."""
        end = self._end_of(hello)
        return end is not None and end.killed

    def _end_of(self, hello: pb.SlotHello) -> SlotEnd | None:
        return self.launcher.end_of(hello.name, REAP_S) if self.launcher is not None else None
