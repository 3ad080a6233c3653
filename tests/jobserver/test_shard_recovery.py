"""Snapshots of a job's shards, and their restoration: what the carrier of the state machine does, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from nfdt.core.errors import JobCancelled, NotStored, ServerUnreachable
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.work.tasks import TaskNumbers
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.job_slot import JobSlot, ShardState
from nfdt.jobserver.shard_clients import ShardSnapshot
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.model.program.state import load_state
from tests.support.restorable_cluster import RestorableCluster
from tests.support.saved_state import store_snapshot
from tests.support.served_mailbox import DEADLINE_S, ServedMailbox
from tests.support.simulated_cluster import job


class ShardsClient:
    """Client of all shards; ``during`` is called in the middle of a snapshot, after the copies are taken."""

    def __init__(self, value: float) -> None:
        self.value, self.alive, self.closed, self.rates = value, True, False, []
        self.before: Callable[[], None] = lambda: None
        self.during: Callable[[], None] = lambda: None

    def snapshot(self, copied: Callable[[], None], artifacts: ArtifactStore, rest: Rest) -> ShardSnapshot:
        self.before()
        copied()
        self.during()
        self._check()
        weights = np.full(3, self.value, np.float32)
        return store_snapshot(artifacts, weights, rest, {"0/version": weights}, (TaskNumbers(),) * 2, (0, 0))

    def _check(self) -> None:
        if not self.alive:
            raise ServerUnreachable("the shards are gone")

    def set_learning_rate(self, rate: float) -> None:
        self._check()
        self.rates.append(rate)

    def flush(self) -> None:
        self._check()

    def close(self) -> None:
        self.closed = True


class Slots:
    """Slots of two shards; a lost one gets another slot for each release of ``free``."""

    def __init__(self, spec) -> None:
        self.spec, self.shard_state, self.incarnation, self.moved = spec, ShardState(), 0, 0
        self.free = threading.Semaphore(0)
        self.shards = [JobSlot(None, f"shard-{i}", i, address=f"127.0.0.1:{i + 1}") for i in range(2)]
        self.serve: Callable[[JobSlot], None] = lambda shard: setattr(shard, "address", "127.0.0.1:9")

    def replace_shard(self, shard: JobSlot) -> bool:
        shard.failing_over = not self.free.acquire(blocking=False)
        return not shard.failing_over

    def restart_shards(self, incarnation: int) -> None:
        self.incarnation = incarnation
        for shard in self.shards:
            shard.address = ""
        for shard in self.shards:
            self.serve(shard)

    def move_workers(self) -> None:
        self.moved += 1


class JobLog:
    """Events of the job and its newest snapshot; ``full``: there is no room for snapshots."""

    def __init__(self) -> None:
        self.events, self.newest, self.needs, self.full = [], None, set(), False

    def record(self, kind: str, data: dict) -> None:
        self.events.append((kind, data))

    def snapshot(self, state: str, progress, records: str) -> None:
        if self.full:
            raise NotStored("no room")
        self.newest = (state, records)

    def needed(self) -> set[str]:
        return self.needs

    def retry(self) -> None:
        pass

    def stalled(self, missing: list[str], seconds: float) -> None:
        self.record("stalled", {"waiting_for": missing, "since_s": seconds})


class Job:
    """A job that trains, with the carrier of its recovery; ``clients`` has the client of each attempt's shards."""

    def __init__(self, folder, preset: str) -> None:
        self.cluster = RestorableCluster(job(preset))
        self.cluster.join(2)
        self.cluster.coordinator.proceed(0)
        for worker in self.cluster.workers.values():
            worker.ask()
        self.machine = self.cluster.coordinator.recovery
        self.artifacts, self.slots = ArtifactStore(folder), Slots(job(preset))
        self.log, self.fetchable, self.mailbox = JobLog(), set(), ServedMailbox(self.cluster.clock)
        self.failures = self.mailbox.failures
        self.clients: list[ShardsClient] = []
        self.connected: Callable[[ShardsClient], None] = lambda client: None
        parts = SimpleNamespace(
            server=SimpleNamespace(clock=self.cluster.clock, artifacts=self.artifacts, launcher=None),
            job_id="job-1",
            slots=self.slots,
            job_log=self.log,
            fetchable=self.fetchable,
            mailbox=self.mailbox,
            connect_shards=self.connect,
        )
        self.recovery = ShardRecovery(parts, self.cluster.coordinator)

    def connect(self) -> ShardsClient:
        self.clients.append(ShardsClient(float(len(self.clients))))
        self.connected(self.clients[-1])
        return self.clients[-1]

    def lose(self, number: int = 0) -> None:
        def lose() -> None:
            self.clients[-1].alive = False
            self.recovery.lose(self.slots.shards[number], "it was killed")

        self.mailbox.handle(lose)

    def pass_time(self, seconds: float) -> None:
        self.cluster.clock.advance(seconds)
        self.mailbox.handle(lambda: None)  # its thread waits in real time

    def failed(self) -> bool:
        self.mailbox.wait_until(lambda: self.failures)
        return True

    def restored(self, attempt: int = 1) -> None:
        self.mailbox.wait_until(lambda: self.machine.serves(attempt))

    def restore_now(self) -> None:
        self.lose()
        self.slots.free.release()
        self.restored(self.machine.attempt + 1)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.log.events]

    @property
    def stored(self) -> set[str]:
        return {path.name for path in self.artifacts.root.iterdir()}

    def weights(self) -> list[float]:
        return load_state(self.artifacts.path(self.slots.shard_state.state)).weights.tolist()


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(preset: str = "asgd") -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), preset))
        return jobs[-1]

    yield make
    for each in jobs:
        each.mailbox.handle(each.recovery.close)
        each.recovery.shards.close()
        each.mailbox.close()


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list]:
    answers: list = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


# ---- losses


def test_all_shards_are_started_again_once_the_lost_one_has_a_slot(make):
    job = make()
    job.recovery.shards.set_learning_rate(0.25)
    job.lose()
    assert job.recovery.running
    assert job.slots.incarnation == 0
    job.slots.free.release()
    job.restored()
    assert job.slots.incarnation == job.slots.moved == 1
    assert job.clients[1].rates == [0.25]
    assert job.kinds() == ["shard_lost", "shards_restored"]
    assert job.log.events == [
        ("shard_lost", {"shard": "shard-0", "reason": "it was killed"}),
        ("shards_restored", {"seconds": 0.0, "redone_samples": 0}),
    ]
    assert not job.recovery.running


def test_another_shard_that_is_lost_while_the_successors_are_called_gets_a_slot_too(make):
    job = make()

    def lose_another(client: ShardsClient) -> None:
        job.connected = lambda client: None
        job.lose(1)

    job.connected = lose_another
    job.slots.free.release(2)
    job.lose(0)
    job.restored(2)
    assert job.slots.moved == 1
    assert job.kinds() == ["shard_lost", "shard_lost", "shards_restored"]


def test_successors_that_do_not_answer_are_started_again(make):
    job = make()
    job.recovery.shards.set_learning_rate(0.25)
    job.slots.free.release()
    job.connected = lambda client: setattr(client, "alive", len(job.clients) > 2)
    job.lose()
    job.restored(2)
    assert job.clients[1].closed
    assert job.clients[2].rates == [0.25]
    assert job.slots.moved == 1


def test_a_second_loss_before_there_is_a_slot_is_part_of_the_same_restoration(make):
    job = make()
    job.lose(0)
    job.lose(1)
    job.slots.free.release()
    job.slots.free.release()
    job.restored(1)
    assert job.kinds() == ["shard_lost", "shard_lost", "shards_restored"]


def test_shards_are_lost_again_and_again(make):
    job = make()
    for _ in range(3):
        job.restore_now()
    assert job.slots.moved == 3


def test_a_loss_whose_state_could_not_be_stored_fails_the_job(make):
    job = make()
    job.machine.unstorable(0)
    job.lose()
    assert "shard-0 is lost (it was killed), and the newest state of the shards could not be" in str(job.failures[0])
    assert not job.recovery.running


def test_shards_without_a_slot_are_announced_and_fail_the_job_in_the_end(make):
    job = make()
    job.lose()
    job.pass_time(20.0)
    job.mailbox.wait_until(
        lambda: ("stalled", {"waiting_for": ["a slot for shard-0"], "since_s": 20.0}) in job.log.events
    )
    job.pass_time(160.0)
    assert job.failed()
    assert "A lost shard could not be restored. a slot for shard-0 did not come up within 180 s" in str(job.failures[0])
    with pytest.raises(ServerUnreachable):
        job.recovery.shards.flush()


def test_shards_that_do_not_start_fail_the_job_by_name(make):
    job = make()
    started = threading.Event()

    def serve(shard: JobSlot) -> None:
        shard.address = "" if shard.index else "127.0.0.1:9"
        started.set()

    job.slots.serve = serve
    job.slots.free.release()
    job.lose()
    assert started.wait(DEADLINE_S)
    job.pass_time(180.0)
    assert job.failed()
    assert "restored. shard-1 did not come up within 180 s" in str(job.failures[0])


def test_whatever_goes_wrong_in_a_restoration_fails_the_job_with_the_reason(make):
    job = make()

    def serve(shard: JobSlot) -> None:
        raise RuntimeError("can't start new thread")

    job.slots.serve = serve
    job.slots.free.release()
    job.lose()
    assert job.failed()
    assert "could not be restored. RuntimeError: can't start new thread" in str(job.failures[0])
    assert job.machine.stage == "closed"


def test_calls_to_the_shards_end_with_a_job_that_is_cancelled_in_a_restoration(make):
    job = make()
    job.lose()
    thread, answers = in_background(lambda: pytest.raises(ServerUnreachable, job.recovery.shards.flush))
    job.mailbox.end(JobCancelled("enough"))
    thread.join(DEADLINE_S)
    assert len(answers) == 1


def test_nothing_is_started_for_a_job_that_ends_or_goes_on_in_groups(make):
    job = make()
    job.lose()
    job.mailbox.handle(job.recovery.close)
    job.slots.free.release()
    assert not job.recovery.running
    assert job.recovery._look() is None
    assert job.slots.incarnation == 0
    assert job.failures == []


def test_a_restoration_whose_thread_cannot_start_fails_the_job(make, monkeypatch):
    job = make()

    def start(slow: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(job.mailbox, "start", start)
    job.slots.free.release()
    job.lose()
    assert job.failed()
    assert "could not be restored. RuntimeError: can't start new thread" in str(job.failures[0])
    assert job.machine.stage == "closed"


# ---- snapshots


def test_a_snapshot_replaces_the_one_before_it(make):
    job = make()
    assert job.recovery.store_snapshot()
    first = job.stored
    assert first == job.fetchable == job.slots.shard_state.artifacts
    assert job.log.newest == (job.slots.shard_state.state, job.slots.shard_state.records)
    job.clients[0].value = 7.0
    assert job.recovery.store_snapshot()
    assert job.weights() == [7.0] * 3
    assert job.stored == job.fetchable == job.slots.shard_state.artifacts
    assert not job.stored & first


def test_a_state_that_is_also_a_checkpoint_is_kept(make):
    job = make()
    job.recovery.store_snapshot()
    job.log.needs = {job.slots.shard_state.state}
    job.clients[0].value = 7.0
    job.recovery.store_snapshot()
    assert job.stored == job.log.needs | job.slots.shard_state.artifacts


def test_an_unchanged_state_is_stored_once_and_not_deleted(make):
    job = make()
    assert job.recovery.store_snapshot()
    assert job.recovery.store_snapshot()
    assert job.stored == job.slots.shard_state.artifacts


def test_rounds_go_on_while_the_copies_are_on_their_way(make):
    job, quiesced = make("bsp"), []
    client = job.clients[0]
    client.before = lambda: quiesced.append(job.cluster.coordinator.quiesced)
    client.during = lambda: quiesced.append(job.cluster.coordinator.quiesced)
    assert job.recovery.store_snapshot()
    assert quiesced == [True, False]


@pytest.mark.parametrize("restored", [True, False])
def test_a_snapshot_of_shards_that_were_lost_meanwhile_is_never_used(make, restored):
    job = make()
    assert job.recovery.store_snapshot()
    before, log = job.slots.shard_state, job.log.newest
    client = job.clients[0]

    def lose() -> None:
        (job.restore_now if restored else job.lose)()
        client.alive = True  # its last copy arrived

    client.value, client.during = 7.0, lose
    assert not job.recovery.store_snapshot()
    assert (job.slots.shard_state, job.log.newest) == (before, log)
    assert job.stored == job.fetchable == before.artifacts


def test_a_snapshot_of_a_job_that_has_ended_meanwhile_is_deleted(make):
    job = make()
    job.clients[0].during = job.recovery.close
    assert not job.recovery.store_snapshot()
    assert job.stored == set()


def test_after_shards_that_do_not_answer_rounds_go_on_and_the_next_snapshot_succeeds(make):
    job = make("bsp")
    job.clients[0].before = lambda: job.clients[0]._check()
    job.clients[0].alive = False
    with pytest.raises(ServerUnreachable):
        job.recovery.store_snapshot()
    assert not job.cluster.coordinator.quiesced
    job.clients[0].alive = True
    assert job.recovery.store_snapshot()


def test_a_snapshot_waits_for_the_end_of_a_round(make):
    job = make("bsp")

    def turn() -> None:
        for name in job.cluster.workers:
            job.cluster.turn(name)

    def begin() -> None:
        for worker in job.cluster.workers.values():
            worker.do()
            worker.ask()

    job.mailbox.handle(begin)
    thread, answers = in_background(job.recovery.store_snapshot)
    job.mailbox.wait_until(lambda: job.machine.taking) if not job.machine.taking else None
    for _ in range(6):
        job.mailbox.handle(turn)
    thread.join(DEADLINE_S)
    assert answers == [True]


def test_a_snapshot_waits_for_another_one(make):
    job, reached, go_on = make(), threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(DEADLINE_S)

    job.clients[0].during = hold
    first, answers = in_background(job.recovery.store_snapshot)
    assert reached.wait(DEADLINE_S)
    job.clients[0].during, job.clients[0].value = lambda: None, 7.0
    second, _ = in_background(lambda: answers.append(job.recovery.store_snapshot()))
    go_on.set()
    first.join(DEADLINE_S)
    second.join(DEADLINE_S)
    assert [answer for answer in answers if answer is not None] == [True, True]
    assert job.weights() == [7.0] * 3


def test_nothing_waits_longer_for_a_snapshot_than_its_limit(make, monkeypatch):
    job = make()
    monkeypatch.setattr("nfdt.jobserver.topologies.shard_recovery.SNAPSHOT_S", 0.0)
    assert job.machine.begin_snapshot()
    with pytest.raises(NotStored, match="Another snapshot of the shards has taken more than 0 s"):
        job.recovery.store_snapshot()
    job.recovery.delete_snapshot()
    assert job.log.newest is None  # left to the server's quota


def test_snapshots_are_taken_when_they_are_due_also_after_one_that_failed(make):
    job, tried = make(), threading.Semaphore(0)
    job.clients[0].before = tried.release
    for alive in (False, True):
        job.clients[0].alive = alive
        job.pass_time(job.machine.due_at - job.cluster.clock.now())
        assert tried.acquire(timeout=DEADLINE_S)
        job.mailbox.wait_until(lambda: not job.machine.taking) if job.machine.taking else None
    job.mailbox.wait_until(lambda: job.log.newest is not None)


def test_one_snapshot_is_taken_when_one_is_due_whatever_happens_meanwhile(make, monkeypatch):
    job, started = make(), []
    monkeypatch.setattr(job.mailbox, "start", lambda slow, name: started.append(slow))

    def look() -> None:
        for _ in range(3):
            job.recovery._look_at_clock()

    job.pass_time(job.machine.due_at - job.cluster.clock.now())
    job.mailbox.handle(look)
    assert len(started) == 1
    started[0]()
    job.mailbox.handle(look)
    assert len(started) == 1
    job.pass_time(job.machine.due_at - job.cluster.clock.now())
    job.mailbox.handle(look)
    assert len(started) == 2


def test_the_last_snapshot_is_deleted_with_the_result_of_the_job(make):
    job = make()
    job.recovery.store_snapshot()
    job.recovery.delete_snapshot()
    assert job.log.newest == ("", "")
    assert job.stored == job.fetchable == set()
    assert job.slots.shard_state == ShardState()


def test_the_last_snapshot_is_left_to_the_quota_if_it_cannot_be_deleted(make):
    job = make()
    job.recovery.store_snapshot()
    job.log.full = True
    job.recovery.delete_snapshot()
    assert job.stored == job.slots.shard_state.artifacts


# ---- states that no task leads to


def test_a_state_that_no_task_leads_to_is_stored(make):
    job = make()
    assert job.recovery.renew(0)
    assert job.slots.shard_state.state


def test_a_state_that_went_with_the_shards_is_not_stored(make):
    job = make()
    job.lose()
    thread, answers = in_background(lambda: job.recovery.renew(0))
    job.slots.free.release()
    thread.join(DEADLINE_S)
    assert answers == [False]
    assert job.slots.shard_state == ShardState()


def test_a_state_is_stored_once_shards_answer_that_were_not_lost(make):
    job = make()
    attempts = iter([False])
    client = job.clients[0]

    def before() -> None:
        client.alive = next(attempts, True)
        client._check() if not client.alive else None

    client.before = before
    client.flush = lambda: setattr(client, "flushed", True)
    assert job.recovery.renew(0)
    assert client.flushed
    assert job.slots.shard_state.state


def test_without_room_for_the_state_the_job_goes_on_but_may_lose_no_shard(make):
    job = make()
    job.log.full = True
    assert job.recovery.renew(0)
    assert not job.machine.possible
    job.log.full = False
    assert job.recovery.store_snapshot()
    assert job.machine.possible


def test_a_state_is_not_stored_twice_for_a_job_that_goes_on_in_groups(make):
    job = make()
    job.mailbox.handle(job.recovery.close)
    assert job.recovery.renew(0)
    assert job.stored == set()


def test_a_state_that_is_stored_is_the_present_one_until_something_changes(make):
    job = make()
    merger = job.cluster.coordinator.merger
    assert job.recovery.present_state() == ""
    job.recovery.renew(0)
    assert job.recovery.present_state() == job.slots.shard_state.state
    job.restore_now()  # with this state
    assert job.recovery.present_state() == job.slots.shard_state.state
    merger.replace([np.ones(3)])
    assert job.recovery.present_state() == ""
    job.recovery.renew(1)
    assert job.recovery.present_state() == job.slots.shard_state.state
    job.recovery.outdate()
    assert job.recovery.present_state() == ""
    job.recovery.renew(1)
    assert job.recovery.store_snapshot()  # while tasks are trained
    assert job.recovery.present_state() == ""
