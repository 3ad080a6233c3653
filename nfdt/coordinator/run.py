"""One job from its submission to its end: a thread that carries out what the pure coordinator decides."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

from nfdt.consistency import make_policy
from nfdt.coordinator import instructions as ins
from nfdt.coordinator.composer import StateComposer, merger_of
from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.crew import Crew, Seat
from nfdt.coordinator.messages import to_reply, to_report
from nfdt.coordinator.outcome import Outcome, SlotError, outcome_of
from nfdt.coordinator.progress import StallWatch
from nfdt.coordinator.shard_control import ShardControl
from nfdt.coordinator.site import Site
from nfdt.coordinator.slots import News, Slot
from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import JobCancelled, JobFailed, NfdtError, ServerUnreachable, UsageError
from nfdt.core.jobs.admission import read_manifest, references
from nfdt.core.jobs.feed import FeedQueue
from nfdt.core.spec import JobSpec
from nfdt.core.wire import jobs_pb2
from nfdt.core.wire import workers_pb2 as pb
from nfdt.metrics import merge_statistics, parse_statistics

_log = logging.getLogger(__name__)

TICK_S = 1.0
MAX_WAIT_S = 30.0  # of one call of Next
SHARD_START_S = 180.0
STALL_AFTER_S = 15.0
BLAME_S = 2.0  # how long a broken connection waits for the end of the process that broke it
ALONE_S = 20.0


class Abandoned(Exception):
    """The server stops: the job's end is not told, the next server settles it."""


class JobRun:
    """See the module. Methods named after RPCs may be called from any thread.

    Attributes:
        job_id: The job.
        spec: What it is.
        manifest: Its program.
        crew: Its slots; touched under the lock only once the thread runs.
        artifacts: The names its slots may fetch.
    """

    def __init__(self, site: Site, job_id: str, spec: JobSpec, session: str) -> None:
        self._site = site
        self.job_id, self.spec = job_id, spec
        self.manifest = read_manifest(spec, site.artifacts)
        self.artifacts = references(spec)
        self._token = secrets.token_hex(32)
        self.crew = Crew(site, job_id, spec, session, self._token, self._on_slot)
        self._changed = threading.Condition()
        self._feed = FeedQueue(self._wake)
        self._coordinator: Coordinator | None = None
        self._shards: ShardControl | None = None
        self._composer: StateComposer | None = None
        self._stop: BaseException | None = None
        self._blame_until: float | None = None
        self._permitted = -1
        self._stop_training = False
        self._learning_rate: float | None = None
        self._readers = 0
        self._moment = 0
        self._ended = False
        self._attended = spec.attended
        self._watchers = 0
        self._unwatched_since = site.clock.now()
        self._alone_since: float | None = None
        self.thread = threading.Thread(target=self._live, name=job_id, daemon=True)

    # ---- what others say, on their threads

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_slot(self, slot: Slot, news: News, message: pb.SlotMessage | None) -> None:
        """A slot of the job is ready, has finished, has failed, or is lost."""
        with self._changed:
            seat = self.crew.seat_of(slot)
            if seat is None or seat.gone:
                return
            if news == "ready" and message is not None:
                seat.address = message.ready.address
            elif seat in self.crew.shards:
                self._shard_gone(seat, news, message)
            else:
                self._worker_gone(seat, news, message)
            self._changed.notify_all()

    def _shard_gone(self, seat: Seat, news: News, message: pb.SlotMessage | None) -> None:
        seat.gone = True
        if news == "failed" and message is not None:
            self._end(SlotError(seat.name, message.failed))
        elif not self._ended:
            what = "its process ended" if news == "lost" else "it stopped serving"
            self._end(
                JobFailed(
                    f"{seat.name} of the job is gone ({what}: process {seat.slot.hello.pid} on "
                    f"{seat.slot.hello.host}), and with it its part of the weights. Submit the job again."
                ),
                final=True,
            )

    def _worker_gone(self, seat: Seat, news: News, message: pb.SlotMessage | None) -> None:
        seat.gone = True
        if news == "failed" and message is not None:
            self._end(SlotError(seat.name, message.failed))
        elif self._coordinator is not None:
            self._coordinator.left(seat.name, "its process ended" if news == "lost" else "it left the job")

    def _end(self, error: BaseException, *, final: bool = False) -> None:
        """Let the job end with this; a broken connection gives way to the reason why it broke."""
        if self._stop is not None and not (final and self._blame_until is not None):
            return
        self._stop = error
        grace = isinstance(error, SlotError) and error.lost_connection
        self._blame_until = self._site.clock.now() + BLAME_S if grace else None
        self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Give the job up."""
        with self._changed:
            self._end(JobCancelled(reason or "somebody cancelled it"), final=True)

    def abandon(self) -> None:
        """The server stops."""
        with self._changed:
            self._stop, self._blame_until = Abandoned(), None
            self._changed.notify_all()

    def watching(self, change: int) -> None:
        """One client more or less watches the job."""
        with self._changed:
            self._watchers += change
            self._unwatched_since = self._site.clock.now()

    @property
    def feed(self) -> FeedQueue:
        """Where the client's batches go."""
        return self._feed

    def control(self, request: jobs_pb2.ControlRequest) -> None:
        """An action of a client."""
        match request.WhichOneof("action"):
            case "cancel":
                self.cancel(request.cancel.reason)
            case "proceed":
                self._note(permitted=request.proceed.epoch)
            case "stop_training":
                self._note(stop_training=True)
            case "set_learning_rate":
                self._set_learning_rate(request.set_learning_rate.value)
            case "set_weights":
                with self._standing("weights can be set") as composer:
                    composer.replace(request.set_weights.artifact)

    def _note(self, *, permitted: int = -1, stop_training: bool = False) -> None:
        with self._changed:
            self._permitted = max(self._permitted, permitted)
            self._stop_training = self._stop_training or stop_training
            self._changed.notify_all()

    def _set_learning_rate(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise UsageError(f"learning_rate: expected a number >= 0. Received: {value}.")
        with self._changed:
            self._learning_rate = value
            shards = self._shards
        if shards is not None and not self._ended:
            shards.set_learning_rate(value)

    def snapshot(self) -> str:
        """The artifact of the state between two epochs."""
        with self._standing("a snapshot can be taken") as composer:
            return composer.compose(self._moment)

    def _standing(self, what: str) -> _Standing:
        return _Standing(self, what)

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """A worker reports and asks for work; waits for some up to the time it gives."""
        report = to_report(request)
        deadline = self._site.clock.now() + min(request.wait_s, MAX_WAIT_S)
        with self._changed:
            seat = self.crew.workers.get(request.worker)
            coordinator = self._coordinator
            if seat is None or seat.gone or coordinator is None or self._ended:
                return to_reply(ins.Leave("The job has ended."))
            seat.report = parse_statistics(request.statistics_json) or seat.report
            instruction = coordinator.next(request.worker, report)
            self._changed.notify_all()
            while isinstance(instruction, ins.Wait) and not self._ended and alive():
                left = deadline - self._site.clock.now()
                if left <= 0:
                    break
                self._changed.wait(left)
                instruction = coordinator.next(request.worker)
        return to_reply(instruction)

    # ---- before the run's thread begins

    def recruit(self, shards: int, workers: int) -> None:
        """Take the slots the job begins with."""
        with self._changed:
            self.crew.recruit_shards(shards)
            self.crew.recruit_workers(workers)

    def stopped_by(self) -> BaseException | None:
        """What ends the job before it has begun, if anything does."""
        with self._changed:
            return self._stop

    # ---- the run's own thread

    def _live(self) -> None:
        outcome: Outcome | None = None
        try:
            self._begin()
            self._train()
            self._keep_result()
            outcome = Outcome("succeeded")
        except Abandoned:
            pass
        except BaseException as error:
            if not isinstance(error, NfdtError):
                _log.exception("job %s", self.job_id)
            better = self._reason_behind(error)
            outcome = None if isinstance(better, Abandoned) else outcome_of(better)
        self.close(outcome)

    def _reason_behind(self, error: BaseException) -> BaseException:
        """A shard that does not answer is most often one whose end is noticed a moment later."""
        if not isinstance(error, ServerUnreachable):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self._stop is not None and self._blame_until is None, BLAME_S)
            return self._stop or error

    def close(self, outcome: Outcome | None) -> None:
        """Let everything go, then tell how the job ended (None: tell nothing)."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._feed.close()
        self.crew.release()
        if self._shards is not None:
            self._shards.close()
        if outcome is not None:
            try:
                self._site.store.transition(self.job_id, outcome.state, reason=outcome.reason, error=outcome.error)
            except NfdtError:
                _log.exception("job %s: its end could not be stored", self.job_id)

    def _check(self) -> None:
        """Raise what ends the job, if anything does. Under the lock."""
        if self._stop is not None and (self._blame_until is None or self._site.clock.now() >= self._blame_until):
            raise self._stop

    def _begin(self) -> None:
        self._site.store.transition(self.job_id, "starting")
        with self._changed:
            for seat in self.crew.shards:
                self.crew.start_shard(seat)
            self._await_shards()
        layout = ParameterLayout.from_json(self.manifest["layout"])
        described = self.manifest.get("optimizer_variables")
        shards = ShardControl(
            [seat.address for seat in self.crew.shards],
            layout,
            self._token,
            owners=None if described is None else [int(entry["variable"]) for entry in described],
            ca_file=self._site.shard_ca_file,
        )
        merger = merger_of(self.manifest, self._site.artifacts)
        with self._changed:
            self._shards, self._composer = shards, StateComposer(shards, merger, self._site.artifacts)
            wanted_rate = self._learning_rate
        if wanted_rate is not None:
            shards.set_learning_rate(wanted_rate)
        with self._changed:
            policy = make_policy(self.spec.algorithm)
            self._coordinator = Coordinator(self._paced_spec(), policy, self._site.clock, merger)
            self._seat_workers(self.crew.living())
        self._site.store.transition(self.job_id, "running")

    def _paced_spec(self) -> JobSpec:
        """The job as its coordinator sees it: every epoch waits for this run, and only who is there is waited for."""
        workers = max(1, len(self.crew.living()))
        cluster = self.spec.cluster.model_copy(update={"workers": workers})
        return self.spec.model_copy(update={"attended": True, "cluster": cluster})

    def _await_shards(self) -> None:
        deadline = self._site.clock.now() + SHARD_START_S
        stall = StallWatch(self._site.clock.now(), STALL_AFTER_S)
        while waiting := [seat.name for seat in self.crew.shards if not seat.address]:
            self._check()
            now = self._site.clock.now()
            if now >= deadline:
                names = ", ".join(waiting)
                raise JobFailed(f"{names} did not begin to serve within {SHARD_START_S:.0f} s; see its log.")
            if (since := stall.stalled_s(now)) is not None:
                self._site.store.append(self.job_id, "stalled", {"waiting_for": waiting, "since_s": since})
            self._changed.wait(TICK_S)

    def _seat_workers(self, seats: list[Seat]) -> None:
        assert self._coordinator is not None
        here = self.crew.count_here()
        for seat in seats:
            self._coordinator.joined(seat.name, seat.index, seat.details)
            self.crew.start_worker(seat, here)

    def _train(self) -> None:
        """Carry out effects until training is done."""
        ticked_at = self._site.clock.now() - TICK_S
        while True:
            with self._changed:
                self._check()
                ticked_at = self._tick(ticked_at)
                effects = self._drain()
                if not effects:
                    self._changed.wait(TICK_S)
            for effect in effects:
                if self._carry_out(effect):
                    return

    def _tick(self, ticked_at: float) -> float:
        assert self._coordinator is not None
        now = self._site.clock.now()
        if now - ticked_at < TICK_S:
            return ticked_at
        self._attend(now)
        self._replace_lost(now)
        self._coordinator.tick()
        self._changed.notify_all()
        return now

    def _drain(self) -> list[ins.Effect]:
        """What is to be done; with nothing left to do, what clients have said is passed on."""
        assert self._coordinator is not None
        self._pump_feed()
        effects = self._coordinator.drain()
        if effects or self._readers:
            return effects
        if self._stop_training:
            self._stop_training = False
            self._coordinator.stop_training()
        permitted = self._permitted if self._attended else self.spec.fit.epochs
        if self._coordinator.phase == "hold" and permitted >= self._coordinator.epoch:
            # One epoch at a time: its end is carried out before the next one may begin.
            self._coordinator.proceed(self._coordinator.epoch)
        effects = self._coordinator.drain()
        if effects:
            self._changed.notify_all()
        return effects

    def _pump_feed(self) -> None:
        if self.spec.train.kind != "stream":
            return
        assert self._coordinator is not None
        credit = self._coordinator.feed_credit
        self._feed.allow(credit.epoch, credit.total)
        news = False
        while (batch := self._feed.take()) is not None:
            self._coordinator.fed(batch.epoch, batch.data, batch.samples)
            news = True
        if self._feed.exhausted(credit.epoch):
            self._coordinator.feed_ended(credit.epoch)
            news = True
        if news:
            self._changed.notify_all()

    def _attend(self, now: float) -> None:
        """An attended job whose client is gone is cancelled, or goes on alone."""
        if not self._attended or self._watchers > 0 or now - self._unwatched_since < self._site.attend_timeout_s:
            return
        gone = f"Its client has been gone for {self._site.attend_timeout_s:.0f} s"
        if self._site.cancels_abandoned:
            raise JobCancelled(f"{gone}.")
        if self.spec.train.kind == "stream":
            raise JobFailed(f"{gone}, and with it the batches that it fed.")
        self._attended = False
        self.tell("warning", f"{gone}; training goes on without its callbacks.")

    def _replace_lost(self, now: float) -> None:
        """Free slots take the place of workers that are gone or never came."""
        assert self._coordinator is not None
        if self._coordinator.phase == "ended":
            return
        missing = self.spec.cluster.workers - len(self.crew.living())
        if missing > 0:
            self._seat_workers(self.crew.recruit_workers(missing))
        if self.crew.living():
            self._alone_since = None
        else:
            self._alone_since = now if self._alone_since is None else self._alone_since
            attending, _ = self._site.pool.attending("worker", self.crew.accepts)
            if now - self._alone_since > ALONE_S and not attending:
                self._coordinator.fail("All workers are gone, and no worker slot attends the server any more.")

    def tell(self, level: str, text: str) -> None:
        """A line of the job's log."""
        self._site.store.append(self.job_id, "log", {"worker": None, "level": level, "text": text})

    def _carry_out(self, effect: ins.Effect) -> bool:
        """Do what the coordinator asks; True when training is done."""
        match effect:
            case ins.Emit(kind, data):
                self._record(kind, data)
            case ins.FlushShards(epoch):
                self._require(self._shards).flush()
                with self._changed:
                    self._require(self._coordinator).flushed(epoch)
                    self._changed.notify_all()
            case ins.ForgetWorker(worker):
                self._forget(worker)
            case ins.GiveUp(worker):
                with self._changed:
                    self.crew.dismiss(self.crew.workers[worker])
            case ins.EpochDone():
                self._keep_checkpoint()
            case ins.Failed(reason):
                raise JobFailed(reason)
            case ins.TrainingDone():
                return True
        return False

    @staticmethod
    def _require(part: Any) -> Any:
        assert part is not None
        return part

    def _record(self, kind: str, data: dict[str, Any]) -> None:
        store = self._site.store
        store.append(self.job_id, kind, data)  # type: ignore[arg-type]
        if kind == "epoch_begin":
            store.update(self.job_id, epoch=data["epoch"])
        elif kind in ("progress", "epoch_end"):
            store.update(self.job_id, last_logs_json=json.dumps({**data["logs"], **_validation_logs(data)}))

    def _forget(self, worker: str) -> None:
        try:
            self._require(self._shards).forget(worker)
        except NfdtError as error:  # a shard that is gone ends the job by itself
            _log.info("job %s: %s", self.job_id, error)

    def _keep_checkpoint(self) -> None:
        """Write the epoch's state down; the one before goes. Then the next epoch may begin."""
        self._moment += 1
        self._site.store.update(self.job_id, workers_json=json.dumps(self._statistics([])))
        if not self._site.keeps_checkpoints:
            return
        before = self._site.store.get(self.job_id).checkpoint_artifact
        artifact = self._require(self._composer).compose(self._moment)
        self._site.store.update(self.job_id, checkpoint_artifact=artifact)
        if before and before not in (artifact, self.manifest.get("state"), *self.artifacts):
            self._site.artifacts.delete(before)

    def _keep_result(self) -> None:
        artifact = self._require(self._composer).compose(self._moment)
        workers = self._statistics(self._require(self._shards).statistics())
        self._site.store.update(self.job_id, result_artifact=artifact, workers_json=json.dumps(workers))
        self._site.store.append(self.job_id, "result", {"artifact": artifact, "workers": workers})

    def _statistics(self, shards: list[Any]) -> dict[str, dict[str, Any]]:
        with self._changed:
            rows = {name: {**seat.details, **seat.report} for name, seat in self.crew.workers.items()}
        return merge_statistics(rows, shards)


def _validation_logs(data: dict[str, Any]) -> dict[str, float]:
    return {f"val_{name}": value for name, value in (data.get("val_logs") or {}).items()}


class _Standing:
    """While this is open, the job stands between two epochs and does not begin the next one."""

    def __init__(self, run: JobRun, what: str) -> None:
        self._run, self._what = run, what

    def __enter__(self) -> StateComposer:
        run = self._run
        with run._changed:
            coordinator, composer = run._coordinator, run._composer
            if coordinator is None or composer is None or run._ended or coordinator.phase not in ("hold", "ended"):
                where = coordinator.phase if coordinator is not None else "start"
                raise UsageError(f"Job {run.job_id}: {self._what} between two epochs. Received: in phase {where}.")
            run._readers += 1
        return composer

    def __exit__(self, *_: object) -> None:
        with self._run._changed:
            self._run._readers -= 1
            self._run._changed.notify_all()
