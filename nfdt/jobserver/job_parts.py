"""Parts of one job that are the same from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.core.errors import JobFailed, NotStored
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import LIMIT_S, PAUSE_S, DiskPatience, JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.mailbox import Mailbox
from nfdt.jobserver.shard_clients import ShardClients, connect_shards
from nfdt.launch.ring import RingMaker
from nfdt.model.program.manifest import Manifest

START_POLL_S = 0.2  # interval of checks for the parts that must start
START_TIMEOUT_S = 180.0  # limit for shards, and for the rings of groups


@dataclass
class JobParts:
    """Parts of one job that are the same from its submission to its end.

    Attributes:
        server: The server.
        job_id: The job.
        slots: Slots of the job; only messages use them.
        job_log: Log of the job.
        fetchable: Names of the artifacts that the job's slots may fetch.
        rings: Maker of the job's rings; None: the server can make none.
        mailbox: Messages of the job.
        manifest: Manifest of its program.
    """

    server: ServerContext
    job_id: str
    slots: JobSlots
    job_log: JobLog
    fetchable: set[str]
    rings: RingMaker | None
    mailbox: Mailbox
    manifest: Manifest

    def connect_shards(self) -> ShardClients:
        """Return a client of the shards at their current addresses."""
        addresses = [job_slot.address for job_slot in self.slots.shards]
        security = {"authority": self.slots.shard_ca, "insecure": self.slots.server.insecure}
        return connect_shards(addresses, self.manifest, self.slots.shard_key, **security)

    def wait_for(self, missing: Callable[[], list[str]]) -> None:
        """Wait until ``missing`` names no part any more.

        Raises:
            JobFailed: The time limit has passed. If the job ends before, the reason is raised.
        """
        clock = self.server.clock
        deadline = clock.now() + START_TIMEOUT_S
        stall = StallWatch(clock.now(), STALL_AFTER_S)

        def found() -> bool | None:
            if not (waiting := missing()):
                return True
            self.mailbox.check()
            self.job_log.retry()
            now = clock.now()
            if now >= deadline:
                raise JobFailed(f"{', '.join(waiting)} did not come up within {START_TIMEOUT_S:.0f} s; see its log.")
            if (since := stall.stalled_s(now)) is not None:
                self.job_log.stalled(waiting, since)
            return None

        self.mailbox.wait(found, 2 * START_TIMEOUT_S, poll_s=START_POLL_S)

    def store(self, write: Callable[[], str]) -> str:
        """Return the artifact that ``write`` stores; wait for room on a full disk.

        Raises:
            NotStored: The disk was full for too long.
        """
        patience = DiskPatience(self.job_id, self.server.clock)
        while True:
            try:
                return self.mailbox.call(write)
            except NotStored as error:
                if patience.failure(error):
                    self.job_log.write("warning", f"{error} Training waits until then, up to {LIMIT_S:.0f} s.")
                patience.check(error)
            self.mailbox.wait(self.mailbox.check, PAUSE_S)
