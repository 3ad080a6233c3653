"""One rank of an elastic ring, and the rendezvous that restores a common state after ranks joined or left.

::

    rendezvous ──> elect a leader ──> take the leader's job and commit ──> work ... ──a rank is lost──> rendezvous
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
from horovod.common.elastic import State

from hfdt.runtime.artifacts import OpenArtifacts, share
from hfdt.runtime.elastic.job import ElasticJob, Snapshot
from hfdt.runtime.ring import Command, RingMember
from hfdt.runtime.tensorflow_ranks import HorovodRanks
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import parse_job
from nfdt.core.work import instructions as ins
from nfdt.core.work.spans import SpanRing


@dataclass(frozen=True)
class Candidate:
    """State of one rank at a rendezvous.

    Attributes:
        number: Number of the rank for the lifetime of its process; -1 before it is assigned.
        commit: Number of its last commit; -1 without one.
        job: Identifier of its job; "" for none.
        reaches_server: Whether it can reach the job server.
        leads: Whether it is the current leader.
        directory: Directory of the ring; "" if the rank does not know it.
        used: Numbers of all ranks that its last commit has metrics of.
        resets: Number of changes of the set of ranks that it knows of.
        attempted: Highest step that it has begun.
        host: Name of its machine.
    """

    number: int
    commit: int
    job: str
    reaches_server: bool
    leads: bool
    directory: str = ""
    used: Sequence[int] = ()
    resets: int = 0
    attempted: int = 0
    host: str = ""


def lost_hosts(before: Mapping[int, str], present: Collection[int]) -> list[str]:
    """Return the machines of the ranks that are not present any more, by their numbers."""
    return [host for number, host in sorted(before.items()) if number not in present]


def elect(candidates: Sequence[Candidate]) -> int:
    """Return the new leader: the current leader, else the rank with the newest commit, else the lowest.

    Raises:
        JobFailed: no rank can reach the job server.
    """
    # Horovod would elect by the age of hosts, but the server may listen on the loopback interface of one machine.
    able = [rank for rank, candidate in enumerate(candidates) if candidate.reaches_server]
    if not able:
        raise JobFailed(
            "The rank that spoke for the ring is gone, and no other rank can reach the job server: they are on other "
            "machines, or the script itself was that rank. Submit the job again."
        )
    return max(able, key=lambda rank: (candidates[rank].leads, candidates[rank].commit, -rank))


def assign_numbers(candidates: Sequence[Candidate]) -> list[int]:
    """Return a number for every rank: its own, or a previously unused one."""
    unused = itertools.count(max(number for c in candidates for number in (c.number, *c.used)) + 1)
    return [candidate.number if candidate.number >= 0 else next(unused) for candidate in candidates]


class ElasticMember(RingMember, State):
    """One rank; a ``State`` of Horovod's elastic runtime, which calls the methods without arguments.

    Args:
        communicator: The ranks.
        directory: Directory of the ring; None if only the leader has it, until the first :meth:`rendezvous`.
        reaches_server: Whether this rank can reach the job server.
        open_artifacts: Makes the artifacts of a job readable; None: the leader shares them with the others.
        spans: Records what this rank does.

    Attributes:
        job: Current job.
        leads: Whether this rank is the leader; valid after the first :meth:`rendezvous`.
        resets: Number of changes of the set of ranks.
        redone: Number of steps that were repeated.
        gone: Machines of the ranks that the last change has taken, as far as this rank knew them.
    """

    communicator: HorovodRanks

    def __init__(
        self,
        communicator: HorovodRanks,
        directory: Path | None,
        *,
        reaches_server: bool,
        open_artifacts: OpenArtifacts | None = None,
        spans: SpanRing | None = None,
    ) -> None:
        RingMember.__init__(self, communicator, open_artifacts or functools.partial(share, communicator), spans)
        State.__init__(self, bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self.directory, self._reaches_server = directory, reaches_server
        self.job: ElasticJob | None = None
        self._command = Command("release")  # from which the job was built
        self.leads = False
        self.number = -1
        self.resets = self.redone = 0
        self._hosts: dict[int, str] = {}  # by number
        self.gone: list[str] = []
        self._timeline = os.environ.get("HOROVOD_TIMELINE")

    # ---- methods that Horovod requires of a state

    def save(self) -> None:
        """Do nothing: commits are collective, see :meth:`execute`."""

    def restore(self) -> None:
        """Do nothing: :meth:`rendezvous` restores the leader's commit."""

    def sync(self) -> None:
        """Do nothing, like :meth:`restore`."""

    def reset(self) -> None:
        """Read rank and size in the new communicator."""
        self.communicator.read_position()

    def leaving(self) -> None:
        """Prepare for the next communicator, which writes a separate timeline."""
        self.resets += 1
        if self._timeline:
            path = Path(self._timeline)
            os.environ["HOROVOD_TIMELINE"] = str(path.with_name(f"{path.stem}.{self.resets}{path.suffix}"))

    # ---- collective

    def rendezvous(self) -> None:
        """Agree on a leader, a job and its state; collective, and the first call with every new communicator."""
        found = self.communicator.gather_json(asdict(self._candidacy()))
        candidates = [Candidate(**fields) for fields in found]
        self.communicator.leader = elect(candidates)
        self.leads = self.communicator.leads
        numbers = assign_numbers(candidates)
        self.number = numbers[self.communicator.rank]
        self.resets = max(candidate.resets for candidate in candidates)
        self.gone = lost_hosts(self._hosts, numbers)
        self._hosts = {number: candidate.host for number, candidate in zip(numbers, candidates, strict=True)}
        leader = candidates[self.communicator.leader]
        self.directory = Path(leader.directory) if leader.directory else None
        if any(candidate.job != leader.job for candidate in candidates):
            own = self._command.encode() if self.leads else None
            self._apply(Command.decode(self.communicator.broadcast(own)))
        if self.job is not None:
            self.job.attempted = max(candidate.attempted for candidate in candidates)
            self._restore(self.job, same=len({c.commit for c in candidates}) == 1, present=numbers)

    def _candidacy(self) -> Candidate:
        job = self.job
        snapshot = job.snapshot if job is not None else None
        return Candidate(
            number=self.number,
            commit=snapshot.commit if snapshot else -1,
            job=self.job_id,
            reaches_server=self._reaches_server,
            leads=self.leads,
            directory=str(self.directory or ""),
            used=sorted(snapshot.metrics) if snapshot else (),
            resets=self.resets,
            attempted=job.attempted if job is not None else 0,
            host=socket.gethostname(),
        )

    def _restore(self, job: ElasticJob, *, same: bool, present: list[int]) -> None:
        snapshot = job.snapshot
        if not same:
            own = snapshot.encode() if self.leads and snapshot is not None else b""
            data = self.communicator.broadcast(own if self.leads else None)
            if not self.leads:
                snapshot = Snapshot.decode(data) if data else None
        if snapshot is None:
            return
        self.redone += max(0, job.steps - snapshot.counters["steps"])
        job.resume(snapshot, present)
        job.commit(job.pending)

    @property
    def pending(self) -> ins.Report:
        """Report of the last commit."""
        return self.job.pending if self.job is not None else ins.Report()

    def execute(self, command: Command) -> ins.Report:
        """Execute a command on this rank, and commit; the leader's report is sent to the coordinator. Collective."""
        if command.kind == "idle":
            self.check_host_updates()
            return ins.Report()
        if command.kind == "do":
            report = super().execute(command)
            # The report is part of the commit: a new leader sends it again if the fate of the last one is unknown.
            committed = report if isinstance(command.instruction, ins.Work) else ins.Report()
        else:
            self._apply(command)
            report = committed = self.pending
        if self.job is not None:
            self.job.commit(committed)
        return report

    def _apply(self, command: Command) -> None:
        """Build the job of a command, or drop the current one if the command has none; collective."""
        super().execute(command)
        self._command = command

    def _build(self, values: Mapping[str, Any]) -> ElasticJob:
        """Build a job; a rank that has it already keeps it."""
        spec = parse_job(values["spec"])
        artifacts = self._open_artifacts(spec, values["artifacts"])
        if self.job is not None and self.job_id == values["id"]:
            return self.job
        self.job, self.job_id = None, ""  # drops the last model before the next one is built
        return ElasticJob(spec, self.communicator, artifacts, number=self.number, spans=self._spans)

    def statistics(self) -> dict[str, Any]:
        """Return the totals of the job over all ranks, and how often the ranks changed."""
        assert self.job is not None
        return self.job.statistics(resets=self.resets, redone_steps=self.redone)
