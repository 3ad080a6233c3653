"""Snapshots and losses of the shards as a state machine: reports in any order, at any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.coordinator.failover import Fail, Reach, Resume, Seek, Start
from nfdt.coordinator.recovery import COST_SHARE, MOST_KILLS_UNSTORED, MOST_LOSSES, QUIET_S, RESTORE_S, Recovery
from nfdt.core.work.instructions import Work
from tests.support.restorable_cluster import RestorableCluster
from tests.support.simulated_cluster import job

INTERVAL_S = 10.0  # snapshot_s of the job


def begun(preset: str = "asgd", **fields) -> tuple[RestorableCluster, Recovery]:
    """Return a job that trains, with its machine."""
    cluster = RestorableCluster(job(preset, **fields))
    cluster.join(2)
    cluster.coordinator.proceed(0)
    cluster.settle()
    for worker in cluster.workers.values():
        worker.ask()
    assert cluster.coordinator.phase == "train"
    return cluster, cluster.coordinator.recovery


def lose(recovery: Recovery) -> Seek | Fail | None:
    return recovery.lost("shard-0", "it was killed")


def restore(recovery: Recovery) -> Resume | None:
    recovery.checked([])
    recovery.checked([])
    return recovery.called(recovery.attempt, answered=True)


# ---- when a snapshot is due


def test_a_snapshot_is_due_after_each_interval():
    cluster, recovery = begun()
    assert recovery.due_at == INTERVAL_S
    cluster.clock.advance(INTERVAL_S - 0.1)
    assert not recovery.is_due
    cluster.clock.advance(0.1)
    assert recovery.is_due
    assert recovery.begin_snapshot()
    cluster.clock.advance(0.1)
    recovery.end_snapshot(recorded=True)
    assert recovery.due_at == pytest.approx(2 * INTERVAL_S)
    assert not recovery.is_due


def test_snapshots_that_take_long_take_a_small_part_of_the_time():
    cluster, recovery = begun()
    assert recovery.begin_snapshot()
    cluster.clock.advance(4.0)
    recovery.end_snapshot(recorded=True)
    assert recovery.due_at == pytest.approx(4.0 + 4.0 / COST_SHARE)


def test_no_snapshot_is_due_between_two_epochs_or_while_shards_are_lost():
    cluster, recovery = begun()
    cluster.clock.advance(INTERVAL_S)
    assert recovery.is_due
    lose(recovery)
    assert not recovery.is_due
    restore(recovery)
    assert recovery.is_due
    cluster.incarnation = recovery.attempt
    cluster.run()
    assert cluster.coordinator.phase != "train"
    cluster.clock.advance(INTERVAL_S)
    assert not recovery.is_due


def test_a_snapshot_that_makes_room_for_batches_is_due_at_once_but_not_after_one_that_failed(monkeypatch):
    _, recovery = begun()
    monkeypatch.setattr(type(recovery._epochs), "wants_snapshot", True)
    assert recovery.is_due
    for recorded in (False, True):
        assert recovery.begin_snapshot()
        recovery.end_snapshot(recorded=recorded)
        assert recovery.is_due == recorded


# ---- one snapshot


def test_one_snapshot_is_taken_at_a_time():
    _, recovery = begun()
    assert recovery.begin_snapshot()
    assert not recovery.begin_snapshot()
    recovery.end_snapshot(recorded=True)
    assert recovery.begin_snapshot()


@pytest.mark.parametrize("preset", ["asgd", "bsp"])
def test_the_wait_for_the_end_of_a_round_has_a_limit(preset):
    cluster, recovery = begun(preset)
    while not isinstance(cluster.workers["worker-0"].instruction, Work):
        cluster.turn("worker-0")
    assert recovery.begin_snapshot()
    wanted = "wait" if preset == "bsp" else "copy"
    cluster.clock.advance(QUIET_S - 0.1)
    assert recovery.snapshot_step() == wanted
    cluster.clock.advance(0.1)
    assert recovery.snapshot_step() == "drop"


@pytest.mark.parametrize("restored", [False, True])
def test_a_snapshot_of_lost_shards_is_dropped_also_after_their_restoration(restored):
    _, recovery = begun()
    assert recovery.begin_snapshot()
    lose(recovery)
    if restored:
        assert restore(recovery) == Resume(0.0, 0)
    assert recovery.snapshot_step() == "drop"
    assert not recovery.adopt([set()], exact=False)


def test_a_snapshot_that_has_ended_is_not_adopted_afterwards():
    _, recovery = begun()
    assert recovery.begin_snapshot()
    recovery.end_snapshot(recorded=False)
    assert not recovery.adopt([set()], exact=False)


def test_no_snapshot_begins_while_shards_are_lost_or_after_the_end():
    _, recovery = begun()
    lose(recovery)
    assert not recovery.begin_snapshot()
    restore(recovery)
    assert recovery.begin_snapshot()
    recovery.end_snapshot(recorded=True)
    recovery.close()
    assert not recovery.begin_snapshot()


# ---- shards that are killed again and again


def kill(recovery: Recovery, shard: int = 0) -> Seek | Fail | None:
    return recovery.lost(f"shard-{shard}", "it was ended by SIGKILL", killed=True)


def train(cluster: RestorableCluster, recovery: Recovery) -> None:
    """Finish some samples of the epoch."""
    cluster.incarnation, before = recovery.attempt, recovery._finished
    while recovery._finished == before:
        for name in cluster.workers:
            cluster.turn(name)


def store(recovery: Recovery) -> None:
    assert recovery.begin_snapshot()
    assert recovery.adopt([set(), set()], exact=False)
    recovery.end_snapshot(recorded=True)


def test_shards_killed_twice_without_progress_end_the_job_with_how_they_ended():
    _, recovery = begun()
    assert kill(recovery) == Seek()
    restore(recovery)
    failed = kill(recovery, 1)
    text = "Shards were killed 2 times without progress in between, last shard-1 (it was ended by SIGKILL)."
    assert failed == Fail(text, memory=True)
    assert recovery.stage == "closed"
    assert kill(recovery) is None


def test_a_second_kill_while_the_successors_start_counts_too():
    _, recovery = begun()
    kill(recovery)
    assert recovery.checked([]) == Start(1)
    assert isinstance(kill(recovery), Fail)


def test_shards_that_are_killed_together_count_once():
    _, recovery = begun()
    assert kill(recovery, 0) == Seek()
    assert kill(recovery, 1) is None
    assert restore(recovery) is not None


def test_shards_that_make_progress_are_restored_again_and_again():
    cluster, recovery = begun()
    for _ in range(MOST_KILLS_UNSTORED - 1):
        train(cluster, recovery)
        assert kill(recovery) == Seek()
        restore(recovery)
    for _ in range(3 * MOST_LOSSES):
        assert lose(recovery) == Seek()
        restore(recovery)
        train(cluster, recovery)


def test_shards_that_are_lost_again_and_again_without_progress_end_the_job_however_they_end():
    cluster, recovery = begun()
    lose(recovery)
    restore(recovery)
    train(cluster, recovery)
    for _ in range(MOST_LOSSES - 1):
        assert lose(recovery) == Seek()
        assert lose(recovery) is None  # another shard of the same attempt
        restore(recovery)
    failed = lose(recovery)
    assert isinstance(failed, Fail)
    assert failed.memory
    assert failed.reason.startswith("Shards were lost 5 times without progress in between, last shard-0")


def test_shards_that_are_killed_at_every_snapshot_end_the_job():
    cluster, recovery = begun()
    for _ in range(MOST_KILLS_UNSTORED - 1):
        train(cluster, recovery)
        kill(recovery)
        restore(recovery)
    store(recovery)
    for _ in range(MOST_KILLS_UNSTORED - 1):
        train(cluster, recovery)
        assert kill(recovery) == Seek()
        restore(recovery)
    train(cluster, recovery)
    failed = kill(recovery)
    assert isinstance(failed, Fail)
    assert failed.memory
    assert failed.reason.startswith("Shards were killed 5 times without a new snapshot in between, last shard-0")


# ---- a state that could not be stored


def test_a_loss_after_a_state_that_could_not_be_stored_fails_the_job_with_the_reason():
    cluster, recovery = begun()
    recovery.unstorable(0)
    failed = lose(recovery)
    assert failed == Fail("shard-0 is lost (it was killed), and the newest state of the shards could not be stored.")
    assert recovery.stage == "closed"
    assert lose(recovery) is None
    assert not cluster.coordinator.suspended


def test_the_next_snapshot_makes_a_loss_possible_again():
    _, recovery = begun()
    recovery.unstorable(0)
    recovery.unstorable(0)
    assert not recovery.possible
    assert recovery.begin_snapshot()
    assert recovery.adopt([set()], exact=False)
    assert recovery.possible
    assert lose(recovery) == Seek()


def test_a_state_that_shards_had_before_their_restoration_is_not_missed():
    _, recovery = begun()
    lose(recovery)
    recovery.unstorable(0)
    restore(recovery)
    recovery.unstorable(0)
    assert recovery.possible
    recovery.unstorable(1)
    assert not recovery.possible
    recovery.unstorable(0)
    assert not recovery.possible


# ---- losses


def test_shards_that_do_not_come_in_time_fail_the_job_with_the_reason():
    cluster, recovery = begun()
    lose(recovery)
    cluster.clock.advance(RESTORE_S)
    assert recovery.checked(["a slot for shard-0", "a slot for shard-1"]) == Fail(
        "a slot for shard-0, a slot for shard-1 did not come up within 180 s; see its log."
    )


def test_workers_go_on_with_the_first_answer_of_the_restored_shards():
    cluster, recovery = begun()
    assert lose(recovery) == Seek()
    assert recovery.checked([]) == Start(1)
    assert recovery.checked([]) == Reach(1)
    assert recovery.called(1, answered=False) is None
    assert cluster.coordinator.waiting_for() == ("shards",)
    cluster.clock.advance(2.5)
    assert recovery.checked([]) == Start(2)
    assert recovery.checked([]) == Reach(2)
    assert recovery.called(2, answered=True) == Resume(2.5, 0)
    assert cluster.coordinator.waiting_for() != ("shards",)


# ---- any order

ATTEMPTS = st.integers(0, 2)  # before the newest one
REPORTS = st.one_of(
    st.tuples(st.just("lost"), st.just(0)),
    st.tuples(st.just("checked"), st.integers(0, 1)),
    st.tuples(st.just("checked"), st.just(0)),
    st.tuples(st.sampled_from(["answered", "answered", "silent", "unstorable"]), st.sampled_from([0, 0, 0, 1, 2])),
    st.tuples(st.sampled_from(["begin", "step", "go_on", "adopt", "adopt exact", "end", "fail"]), st.just(0)),
    st.tuples(st.sampled_from(["turn"] * 4), st.integers(0, 1)),
    st.tuples(st.sampled_from(["close"] + ["pass"] * 9), st.integers(0, 70)),
)


class Model:
    """What must be true of the machine after each report, kept apart from it."""

    def __init__(self, preset: str) -> None:
        self.cluster, self.recovery = begun(preset, epochs=2)
        self.possible, self.taking_of, self.failures = True, None, 0

    @property
    def attempts(self) -> int:
        return self.recovery.attempt

    def report(self, kind: str, data: int) -> None:
        recovery, serving = self.recovery, self.recovery.stage == "serving"
        attempt = recovery.attempt - data
        match kind:
            case "lost":
                self._lose(serving)
            case "checked":
                self.failures += isinstance(recovery.checked(["a slot for shard-0"][:data]), Fail)
            case "answered" | "silent":
                connecting = recovery.stage == "connecting"
                resume = recovery.called(attempt, answered=kind == "answered")
                assert (resume is not None) == (connecting and data == 0 and kind == "answered")
            case "unstorable":
                recovery.unstorable(attempt)
                self.possible = self.possible and not (serving and data == 0)
            case "begin":
                assert recovery.begin_snapshot() == (serving and self.taking_of is None)
                self.taking_of = recovery.attempt if serving and self.taking_of is None else self.taking_of
            case "step" if self.taking_of is not None:
                step = recovery.snapshot_step()
                assert step == "drop" or (serving and self.taking_of == recovery.attempt)
            case "go_on":
                recovery.go_on()
            case "adopt" | "adopt exact":
                adopted = recovery.adopt([set(), set()], exact=kind == "adopt exact")
                assert adopted == (serving and self.taking_of == recovery.attempt), "a state that no shard has"
                self.possible = self.possible or adopted
            case "end" | "fail" if self.taking_of is not None:
                recovery.end_snapshot(recorded=kind == "end")
                assert recovery.due_at >= self.cluster.clock.now()
                self.taking_of = None
            case "turn":
                self.cluster.incarnation, self.cluster.lost = recovery.attempt, recovery.restoring
                self.cluster.turn(list(self.cluster.workers)[data])
            case "pass":
                self.cluster.clock.advance(data)
            case "close":
                recovery.close()
        assert recovery.taking == (self.taking_of is not None)
        assert recovery.possible == self.possible

    def _lose(self, serving: bool) -> None:
        closed, effect = self.recovery.stage == "closed", self.recovery.lost("shard-0", "it was killed")
        in_vain = isinstance(effect, Fail) and effect.memory
        assert not in_vain or self.attempts >= MOST_LOSSES - 1
        assert isinstance(effect, Fail) == (in_vain or (not self.possible and not closed))
        assert isinstance(effect, Seek) == (serving and self.possible and not in_vain)
        self.failures += isinstance(effect, Fail)


@given(st.sampled_from(["asgd", "bsp"]), st.lists(REPORTS, max_size=60))
def test_reports_in_any_order_end_in_a_defined_state(preset, reports):
    model = Model(preset)
    for kind, data in reports:
        model.report(kind, data)
    cluster, recovery = model.cluster, model.recovery
    assert model.failures <= 1
    if recovery.taking:
        recovery.end_snapshot(recorded=False)
    for _ in range(2):
        restore(recovery)
    assert recovery.stage in ("serving", "closed")
    if recovery.stage == "serving":
        assert recovery.begin_snapshot()
        assert recovery.adopt([set(), set()], exact=True)
        recovery.end_snapshot(recorded=True)
        cluster.incarnation, cluster.lost = recovery.attempt, False
        assert recovery.possible
        lost = lose(recovery)
        assert lost == Seek() or (lost.memory and model.attempts >= MOST_LOSSES - 1)
