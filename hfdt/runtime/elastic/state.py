"""What the ranks of an elastic ring hold in common, and how they agree on it after some came or went.

::

    meet ──> elect a leader ──> everybody has the leader's job and commit ──> work ... ──a rank is lost──> meet
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
from horovod.common.elastic import State

from hfdt.runtime.artifacts import share
from hfdt.runtime.commands import Order
from hfdt.runtime.communicator import World
from hfdt.runtime.elastic.election import Candidate, assign_numbers, elect
from hfdt.runtime.elastic.job import ElasticJob
from hfdt.runtime.elastic.snapshot import Snapshot
from nfdt.core.program.state import load_state
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_instruction

logger = logging.getLogger(__name__)


class RingState(State):
    """One rank's part of it; Horovod's elastic runtime calls the methods without an argument.

    Args:
        world: The ranks.
        directory: The ring's, where this rank knows it; it learns it from the leader.
        attends: Whether this one can reach the job server.
        names: The artifacts of a job specification.

    Attributes:
        job: What the ring works at.
        leads: Whether this rank speaks for the ring, from its first meeting on.
        resets: How often ranks came or went.
        redone: Steps that were done again.
    """

    def __init__(
        self, world: World, directory: Path | None, *, attends: bool, names: Callable[[Any], set[str]]
    ) -> None:
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self.world, self.directory, self._attends, self._names = world, directory, attends, names
        self.job: ElasticJob | None = None
        self._order = Order("release")  # what the job was built of
        self.leads = False
        self.number = -1
        self.resets = self.redone = 0
        self._timeline = os.environ.get("HOROVOD_TIMELINE")

    # ---- what Horovod asks of a state

    def save(self) -> None:
        """Commits are collective: see :meth:`obey`."""

    def restore(self) -> None:
        """The meeting brings every rank to the leader's commit."""

    def sync(self) -> None:
        """As :meth:`restore`."""

    def reset(self) -> None:
        """The world is another one."""
        self.world.look()

    def leaving(self) -> None:
        """The world is about to become another one; every world has a timeline of its own."""
        self.resets += 1
        if self._timeline:
            path = Path(self._timeline)
            os.environ["HOROVOD_TIMELINE"] = str(path.with_name(f"{path.stem}.{self.resets}{path.suffix}"))

    # ---- together

    def meet(self) -> None:
        """Agree on a leader, a job and its state; collective, and the first thing in every world."""
        found = [json.loads(text) for text in self.world.gather(json.dumps(self._told()).encode())]
        candidates = [Candidate(**answer["candidate"]) for answer in found]
        self.world.leader = elect(candidates)
        self.leads = self.world.leads
        used = [number for answer in found for number in answer["used"]]
        numbers = assign_numbers(candidates, used)
        self.number = numbers[self.world.rank]
        self.resets = max(answer["resets"] for answer in found)
        chief = candidates[self.world.leader]
        self.directory = Path(found[self.world.leader]["directory"])
        if any(candidate.job != chief.job for candidate in candidates):
            self.build(self._share_order())
        if self.job is not None:
            self.job.attempted = max(answer["attempted"] for answer in found)
            self._come_to(self.job, same=len({c.commit for c in candidates}) == 1, present=numbers)

    def _told(self) -> dict[str, Any]:
        job = self.job
        snapshot = job.snapshot if job is not None else None
        candidate = Candidate(
            number=self.number,
            commit=snapshot.commit if snapshot else -1,
            job=self._order.values.get("id", ""),
            attends=self._attends,
            leads=self.leads,
        )
        return {
            "candidate": asdict(candidate),
            "used": sorted(snapshot.metrics) if snapshot else [],
            "resets": self.resets,
            "directory": str(self.directory or ""),
            "attempted": job.attempted if job is not None else 0,
        }

    def _share_order(self) -> Order:
        return Order.decode(self.world.broadcast(self._order.encode() if self.leads else None))

    def _come_to(self, job: ElasticJob, *, same: bool, present: list[int]) -> None:
        snapshot = job.snapshot
        if not same:
            own = snapshot.encode() if self.leads and snapshot is not None else b""
            data = self.world.broadcast(own if self.leads else None)
            if not self.leads:
                snapshot = Snapshot.decode(data) if data else None
        if snapshot is None:
            return
        self.redone += max(0, job.steps - snapshot.counters["steps"])
        job.resume(snapshot, present)
        job.commit(job.pending)

    def build(self, order: Order) -> None:
        """Take a job over, or drop the one there is where the order names none; collective."""
        if order.kind != "job":
            self.job, self._order = None, order
            return
        artifacts = share(self.world, order.values["artifacts"], self._names(parse_job(order.values["spec"])))
        if self._order.values.get("id") != order.values["id"] or self.job is None:
            self.job = None
            self.job = ElasticJob(parse_job(order.values["spec"]), self.world, artifacts, number=self.number)
        self._order = order

    def has(self, job_id: str) -> bool:
        """Whether this ring works at the job."""
        return self.job is not None and self._order.values.get("id") == job_id

    def obey(self, order: Order) -> ins.Report:
        """What every rank does at an order; the answer is the leader's to send. Collective."""
        if order.kind in ("job", "release"):
            self.build(order)
            if self.job is not None:
                self.job.commit(self.job.pending)
        elif order.kind == "do" and self.job is not None:
            return self._do(self.job, order)
        elif order.kind == "idle":
            self.check_host_updates()
        return ins.Report()

    def _do(self, job: ElasticJob, order: Order) -> ins.Report:
        if order.state:
            job.step.load(load_state(order.state))
        if (rate := order.values.get("learning_rate")) is not None:
            job.step.set_learning_rate(rate)
        instruction = read_instruction(pb.NextReply.FromString(order.reply))
        report = job.execute(instruction)
        job.commit(report if isinstance(instruction, ins.Work) else ins.Report())
        return report
