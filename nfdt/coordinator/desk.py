"""What the job's slots and clients say to it, on their own threads: noted under one lock, answered at once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nfdt.coordinator import instructions as ins
from nfdt.coordinator.composer import StateComposer
from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.crew import Crew, Seat
from nfdt.coordinator.ending import Abandoned, Ending
from nfdt.coordinator.group_crew import GroupCrew
from nfdt.coordinator.journal import Journal
from nfdt.coordinator.messages import to_reply, to_report
from nfdt.coordinator.outcome import SlotError
from nfdt.coordinator.ring_view import is_grouped
from nfdt.coordinator.shard_control import ShardControl
from nfdt.coordinator.site import Site
from nfdt.coordinator.slots import News, Slot
from nfdt.coordinator.succession import Succession
from nfdt.coordinator.wishes import Wishes
from nfdt.core.errors import JobCancelled, JobFailed, UsageError
from nfdt.core.jobs.admission import read_manifest, references
from nfdt.core.jobs.feed import FeedQueue
from nfdt.core.spec import JobSpec
from nfdt.core.wire import jobs_pb2
from nfdt.core.wire import workers_pb2 as pb
from nfdt.metrics import new_decisions, parse_statistics

MAX_WAIT_S = 30.0  # of one call of Next


@dataclass(frozen=True)
class Parts:
    """What a job has once its shards serve."""

    shards: ShardControl
    composer: StateComposer
    coordinator: Coordinator


class JobDesk:
    """The state of one job that several threads share; public methods may be called from any.

    Attributes:
        job_id: The job.
        spec: What it is.
        manifest: Its program.
        crew: Its slots.
        groups: Its groups, if its workers form some.
        artifacts: The names its slots may fetch.
        feed: Where the client's batches go.
        journal: Where events go.
    """

    def __init__(self, site: Site, job_id: str, spec: JobSpec, session: str) -> None:
        self._site, self._clock = site, site.clock
        self.job_id, self.spec = job_id, spec
        self.manifest = read_manifest(spec, site.artifacts)
        self.artifacts = references(spec)
        keep = frozenset({*self.artifacts, str(self.manifest.get("state"))})
        self.journal = Journal(site.store, site.artifacts, job_id, keep)
        self._token = secrets.token_hex(32)
        self.crew = Crew(site, job_id, spec, session, self._token, self._on_slot)
        self.groups = GroupCrew(site, job_id, spec, self.crew, self.journal) if is_grouped(spec) else None
        self._changed = threading.Condition()
        self.feed = FeedQueue(self._wake)
        self._ending = Ending(self._changed, self._clock)
        self._wishes = Wishes(spec.attended, self._clock.now())
        self._parts: Parts | None = None
        self._succession: Succession | None = None
        self._readers = 0
        self._moment = 0
        self._ended = False

    # ---- slots

    def recruit(self, shards: int, workers: int) -> None:
        """Take the slots the job begins with."""
        with self._changed:
            self.crew.recruit_shards(shards)
            self.crew.recruit_workers(workers)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_slot(self, slot: Slot, news: News, message: pb.SlotMessage | None) -> None:
        """A slot of the job is ready, has finished, has failed, or is lost."""
        with self._changed:
            seat = self.crew.seat_of(slot)
            if seat is None or seat.gone or self._ended:
                return
            if news == "ready" and message is not None:
                seat.address = message.ready.address
            elif news == "lost" and self._succession is not None and self._parts is not None:
                seat.vacant = True
                self._succession.begin(self._parts.coordinator, self._ending.end)
            else:
                seat.gone = True
                self._seat_gone(seat, news, message)
            self._changed.notify_all()

    def _seat_gone(self, seat: Seat, news: News, message: pb.SlotMessage | None) -> None:
        if news == "failed" and message is not None:
            self._ending.end(SlotError(seat.name, message.failed, seat.members))
        elif seat in self.crew.shards:
            what = "its process ended" if news == "lost" else "it stopped serving"
            hello = seat.slot.hello
            self._ending.end(
                JobFailed(
                    f"{seat.name} of the job is gone ({what}: process {hello.pid} on {hello.host}), "
                    "and with it its part of the weights. Submit the job again."
                )
            )
        elif self._parts is not None:
            self._parts.coordinator.left(seat.name, "its process ended" if news == "lost" else "it left the job")

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """A worker reports and asks for work; waits for some up to the time it gives."""
        report = to_report(request)
        deadline = self._clock.now() + min(request.wait_s, MAX_WAIT_S)
        with self._changed:
            seat = self.crew.workers.get(request.worker)
            if seat is None:
                return to_reply(ins.Leave("The job has ended."))
            self._take_statistics(seat, request.statistics_json)
            instruction = self._instruct(seat, report)
            self._changed.notify_all()
            while isinstance(instruction, ins.Wait) and not self._ended and alive():
                left = deadline - self._clock.now()
                if left <= 0:
                    break
                self._changed.wait(left)
                instruction = self._instruct(seat)
            return self._completed(to_reply(instruction), seat)

    def _instruct(self, seat: Seat, report: ins.Report | None = None) -> ins.Instruction:
        if seat.gone or self._ended:
            return ins.Leave("The job has ended.")
        if self._parts is None or not seat.admitted or seat.vacant:
            return ins.Wait()
        return self._parts.coordinator.next(seat.name, report)

    def _completed(self, reply: pb.NextReply, seat: Seat) -> pb.NextReply:
        """A group is told its share with each epoch."""
        if self.groups is not None and reply.HasField("begin_epoch"):
            reply.begin_epoch.share.CopyFrom(self.groups.share_of(seat.name) or pb.GroupShare())
        return reply

    def _take_statistics(self, seat: Seat, text: str) -> None:
        found = parse_statistics(text)
        for decision in new_decisions(seat.report, found):
            self.journal.record("codec", {"worker": seat.name, **decision})
        seat.report = found or seat.report

    # ---- clients

    def stopped_by(self) -> BaseException | None:
        """What ends the job before it has begun, if anything does."""
        with self._changed:
            return self._ending.cause

    def abandon(self) -> None:
        """The server stops."""
        with self._changed:
            self._ending.end(Abandoned())

    def watching(self, change: int) -> None:
        """One client more or less watches the job."""
        with self._changed:
            self._wishes.watch(change, self._clock.now())

    def control(self, request: jobs_pb2.ControlRequest) -> None:
        """An action of a client."""
        wishes = self._wishes
        with self._changed:
            match request.WhichOneof("action"):
                case "cancel":
                    self._ending.end(JobCancelled(request.cancel.reason or "somebody cancelled it"))
                case "proceed":
                    wishes.permitted = max(wishes.permitted, request.proceed.epoch)
                case "stop_training":
                    wishes.stop_training = True
                case "set_learning_rate":
                    wishes.set_learning_rate(request.set_learning_rate.value)
            self._changed.notify_all()
            parts = None if self._ended else self._parts
        if request.HasField("set_learning_rate") and parts is not None:
            self._set_learning_rate(parts, request.set_learning_rate.value)
        if request.HasField("set_weights"):
            with self._reading("weights can be set", standing=True) as composer:
                composer.replace(request.set_weights.artifact)

    def _set_learning_rate(self, parts: Parts, value: float) -> None:
        """Where the user's optimizer is: on the shards, or with the members of groups that push differences."""
        if self.groups is not None and self.spec.algorithm.outer == "delta":
            self.groups.learning_rate = value
        else:
            parts.shards.set_learning_rate(value)

    def snapshot(self) -> str:
        """The artifact of the state: of the last epoch's end between two epochs, else as every shard has it now."""
        with self._changed:
            moment = self._moment if self._stands() else object()
        with self._reading("a snapshot can be taken", standing=False) as composer:
            return composer.compose(moment)

    def _stands(self) -> bool:
        return self._parts is not None and self._parts.coordinator.phase in ("hold", "ended")

    @contextmanager
    def _reading(self, what: str, *, standing: bool) -> Iterator[StateComposer]:
        """While this is open no epoch begins; ``standing``: and none is under way."""
        with self._changed:
            if self._parts is None or self._ended or (standing and not self._stands()):
                phase = self._parts.coordinator.phase if self._parts is not None else "start"
                when = "between two epochs" if standing else "once it trains"
                raise UsageError(f"Job {self.job_id}: {what} {when}. Received: in phase {phase}.")
            self._readers += 1
            composer = self._parts.composer
        try:
            yield composer
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()
