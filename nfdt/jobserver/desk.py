"""What the job's slots and clients say to it, on their own threads: noted under one lock, answered at once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import is_grouped
from nfdt.core.errors import AuthenticationFailed, JobCancelled, JobFailed, UsageError
from nfdt.core.jobs.admission import read_manifest
from nfdt.core.jobs.feed import FeedQueue
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import jobs_pb2
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.job_token import worker_of
from nfdt.core.work import instructions as ins
from nfdt.core.work.artifacts import artifact_names
from nfdt.core.work.messages import to_reply, to_report
from nfdt.jobserver.client_control import Wishes
from nfdt.jobserver.context import Site
from nfdt.jobserver.job_log import Journal
from nfdt.jobserver.job_slots import QUICK_DEATHS, QUICK_S, Crew, Seat
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.shard_clients import ShardControl
from nfdt.jobserver.slot_pool import News, Slot
from nfdt.jobserver.snapshots import StateComposer
from nfdt.jobserver.termination import Abandoned, Ending
from nfdt.jobserver.topologies.failover import Succession
from nfdt.jobserver.topologies.groups import GroupCrew
from nfdt.jobserver.worker_statistics import new_decisions, parse_statistics

MAX_WAIT_S = 30.0  # of one call of Next
MAX_NAME = 80  # that is quoted
TOO_QUICK = (
    f"{QUICK_DEATHS} workers in a row or more ended within {QUICK_S:.0f} s or before their first step, and nobody is "
    "left from before: no more are started. If memory is short, use fewer workers on one machine or a smaller "
    "batch_size."
)


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
        self.artifacts = artifact_names(spec)
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
        if news == "lost":  # by a thread of gRPC's that all streams share: it cannot wait for the process to end
            threading.Thread(target=self._lose, args=(slot,), name=f"end of {slot.name}", daemon=True).start()
        else:
            self._hear(slot, news, message)

    def _lose(self, slot: Slot) -> None:
        end, hello = self._site.end_of(slot.hello), slot.hello
        self._hear(slot, "lost", how=str(end or f"its process ended ({hello.pid} on {hello.host}, slot {hello.name})"))

    def _hear(self, slot: Slot, news: News, message: pb.SlotMessage | None = None, how: str = "") -> None:
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
                self._seat_gone(seat, news, message, how)
            self._changed.notify_all()

    def _seat_gone(self, seat: Seat, news: News, message: pb.SlotMessage | None, how: str) -> None:
        if news == "failed" and message is not None:
            self._ending.end(SlotError(seat.name, message.failed, seat.members))
        elif seat in self.crew.shards:
            what = how or "it stopped serving"
            hello = seat.slot.hello
            self._ending.end(
                JobFailed(
                    f"{seat.name} of the job is gone ({what}: process {hello.pid} on {hello.host}), "
                    "and with it its part of the weights. Submit the job again."
                )
            )
        else:
            asked = self.spec.cluster.emulate.kills(seat.index)
            how = "it was killed, as emulate.fail asks" if how and asked else how
            if self._parts is not None:
                self._parts.coordinator.left(seat.name, how or "it left the job")
            if how and not asked and not seat.slot.hello.ring and self.crew.died(seat, how):
                self._ending.end(JobFailed(f"{self.crew.last_death}. {TOO_QUICK}"))

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """A worker reports and asks for work; waits for some up to the time it gives.

        A call that is made again, as its answer was lost, gets the same answer; its report counts once.

        Raises:
            AuthenticationFailed: it is not the worker that it says.
        """
        if worker_of(self._token, request.job_token) != request.worker:
            raise AuthenticationFailed(
                f"Job {self.job_id}: expected the token that {request.worker[:MAX_NAME]!r} was assigned with. "
                "Received: another one."
            )
        report: ins.Report | None = to_report(request)
        deadline = self._clock.now() + min(request.wait_s, MAX_WAIT_S)
        with self._changed:
            seat = self.crew.workers.get(request.worker)
            if seat is None:
                return to_reply(ins.Leave("The job has ended."))
            if request.call and request.call <= seat.call:
                report = None
            else:
                seat.call, seat.reply = request.call, None
                self._take_statistics(seat, request.statistics_json)
            while seat.call == request.call and seat.reply is None:
                instruction = self._instruct(seat, report)
                if report is not None:
                    self._changed.notify_all()
                    report = None
                if not isinstance(instruction, ins.Wait):
                    seat.reply = self._completed(to_reply(instruction), seat)
                elif (left := deadline - self._clock.now()) <= 0 or not alive():
                    break
                else:
                    self._changed.wait(left)
            return (seat.reply if seat.call == request.call else None) or to_reply(ins.Wait())

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
                    wishes.permit(request.proceed.epoch, request.proceed.until or None)
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
                self._replaced()

    def _replaced(self) -> None:
        with self._changed:
            if self._parts is not None:
                self._parts.coordinator.replaced()

    def _set_learning_rate(self, parts: Parts, value: float) -> None:
        """Where the user's optimizer is: on the shards, or with the members of groups that push differences."""
        if self.groups is not None and self.spec.algorithm.outer == "delta":
            self.groups.learning_rate = value
        else:
            parts.shards.set_learning_rate(value)

    def snapshot(self) -> str:
        """The artifact of the state: of the last epoch's end between two epochs, else as every shard has it now."""
        with self._changed:
            passing = not self._between_epochs()
            moment = object() if passing else self._moment
        with self._reading("a snapshot can be taken", standing=False) as composer:
            artifact = composer.compose(moment)
        if passing:
            self.journal.passing(artifact)
        return artifact

    def _between_epochs(self) -> bool:
        return self._parts is not None and self._parts.coordinator.phase in ("hold", "ended")

    def _stands(self) -> bool:
        return self._between_epochs() or (self._parts is not None and self._parts.coordinator.standing)

    @contextmanager
    def _reading(self, what: str, *, standing: bool) -> Iterator[StateComposer]:
        """While this is open no epoch begins; ``standing``: and none is under way."""
        with self._changed:
            if self._parts is None or self._ended or (standing and not self._stands()):
                phase = self._parts.coordinator.phase if self._parts is not None else "start"
                when = "between two epochs, or while one stands still" if standing else "once it trains"
                raise UsageError(f"Job {self.job_id}: {what} {when}. Received: in phase {phase}.")
            self._readers += 1
            composer = self._parts.composer
        try:
            yield composer
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()
