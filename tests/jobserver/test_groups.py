"""Members of groups and changes of members, with fake rings and slots."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nfdt.coordinator.group_plan import SHRINK_S
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.topologies.group_recovery import MOST_ATTEMPTS
from nfdt.jobserver.topologies.groups import GroupsTopology
from tests.support.clocks import ManualClock

ROWS = 32


class Worlds:
    """Fake launcher, slots and log: a ring registers at once, and its members report the speeds that are set here."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.steps = 0
        self.ring: dict[str, float] = {}
        self.launched, self.ended, self.logged = [], [], []
        self.failure: dict[tuple[int, ...], str] = {}
        self._leaders: list[JobSlot] = []
        self.free: tuple[int, ...] = ()  # members whose machines have a free slot
        self.awaited: dict[tuple[int, ...], int] = {}

    # launcher
    spans_machines, machines = True, ()

    def place(self, groups, *, together):
        return True

    def reachable(self, members, *, elsewhere=False):
        return tuple(member for member in members if member in self.free)

    def claim(self, shape):
        self.launched.append(shape.members)
        members, outer = shape.members, self

        class Ring:
            origin = "mpirun"
            shape = SimpleNamespace(members=members)

            @property
            def awaited_slots(self):
                return outer.awaited.get(members, 0)

            @property
            def failure(self):
                return outer.failure.get(members)

            def why(self):
                return JobFailed(self.failure)

            def report(self):
                return None

        return Ring()

    def end(self, rings):
        self.ended += [ring.shape.members for ring in rings]

    # slots
    def acquire_leader(self, ring):
        if ring.failure or ring.awaited_slots:
            return None
        job_slot = JobSlot(
            SimpleNamespace(), f"worker-{len(self._leaders)}", len(self._leaders), members=ring.shape.members
        )
        self._leaders.append(job_slot)
        return job_slot

    def start_worker(self, job_slot, here):
        job_slot.started = True
        self.report_steps(job_slot, (ROWS, ROWS // 4) * 10)

    def admit(self, job_slots, coordinator):
        self.admitted = list(job_slots)

    def shut_down(self, job_slot):
        job_slot.gone = True

    def report_steps(self, job_slot, rows):
        self.steps += len(rows)
        recent = {str(m): [self.steps, [(n, self.seconds[m] * n / ROWS) for n in rows[-19:]]] for m in job_slot.members}
        job_slot.report = {"recent": recent, "ring": self.ring}

    def epoch(self):
        for job_slot in self._leaders:
            self.report_steps(job_slot, (ROWS,) * 20)

    # job log
    def write_log(self, level, text):
        self.logged.append(text)

    @property
    def job_log(self):
        return SimpleNamespace(write=self.write_log, record=lambda kind, data: self.logged.append((kind, data)))


def wait_for(missing) -> None:
    assert missing() == []


def group_slots(worlds: Worlds, **options) -> GroupsTopology:
    spec = JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("group-sync", **options),
        cluster=ClusterSpec(workers=len(worlds.seconds)),
        fit=FitSpec(epochs=10, batch_size=ROWS),
        train=DataSpec(kind="arrays", samples=1000),
    )
    parts = SimpleNamespace(
        rings=worlds,
        slots=worlds,
        job_log=worlds.job_log,
        wait_for=wait_for,
        mailbox=SimpleNamespace(handle=lambda message: message()),
        server=SimpleNamespace(launcher=None, clock=ManualClock()),
    )
    return GroupsTopology(parts, spec)


def formed(worlds: Worlds, **options) -> GroupsTopology:
    slots = group_slots(worlds, **options)
    slots.start(1)
    slots.form()
    return slots


def groups_of(slots: GroupsTopology) -> list[tuple[int, ...]]:
    return sorted(share.members for share in slots._shares.values())


def review(slots: GroupsTopology, remaining_s: float = 1e6) -> tuple[list[JobSlot], list[str]]:
    retired: list[str] = []
    expected: list[int] = []
    coordinator = SimpleNamespace(retire_all=lambda: retired.append("all"), expect=expected.append)
    slots._slots.admitted = []
    assert slots.review(coordinator, None, remaining_s) is slots
    assert expected == ([len(slots._slots.admitted)] if retired else [])
    return slots._slots.admitted, retired


def test_workers_are_measured_in_one_world_and_then_grouped():
    worlds = Worlds(0.01, 0.04, 0.01, 0.04)
    slots = formed(worlds)
    assert worlds.launched == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert worlds.ended == [(0, 1, 2, 3)]
    assert groups_of(slots) == [(0, 2), (1, 3)]
    assert sum(slots.sizes.of(worker) for worker in slots._shares) == 4 * ROWS


def test_equal_workers_stay_in_the_world_they_were_measured_in():
    worlds = Worlds(0.01, 0.0101, 0.01)
    slots = formed(worlds)
    assert worlds.launched == [(0, 1, 2)]
    assert worlds.ended == []
    assert [slots.share(worker).rate for worker in slots._shares] == [1.0]


@pytest.mark.parametrize(("bytes_", "groups"), [(1000, [(0, 2, 1, 3)]), (100_000_000, [(0, 2), (1, 3)])])
def test_groups_keep_to_their_machines_if_their_gradient_is_large(bytes_, groups):
    worlds = Worlds(*[0.1] * 4)
    worlds.machines = ("a", "b", "a", "b")
    worlds.ring = {"gradient": bytes_, "bytes": bytes_, "seconds": 1e-5}
    slots = formed(worlds)
    assert worlds.launched[:2] == [(0, 2), (1, 3)]  # measured machine by machine
    assert groups_of(slots) == groups


def test_a_number_of_groups_is_kept():
    assert groups_of(formed(Worlds(0.01, 0.01, 0.02, 0.04), groups=3)) == [(0, 1), (2,), (3,)]


def test_groups_that_are_named_never_change():
    worlds = Worlds(0.01, 0.04, 0.01, 0.04)
    slots = formed(worlds, groups="0,1;2,3")
    for _ in range(4):
        worlds.seconds = [0.05, 0.01, 0.03, 0.01]
        worlds.epoch()
        assert review(slots) == ([], [])
    assert worlds.launched == [(0, 1), (2, 3)]


def test_rows_follow_speeds_at_every_epoch_s_end():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds)
    (fast,) = [worker for worker, share in slots._shares.items() if share.members == (0, 1)]
    before = slots.sizes.of(fast)
    worlds.seconds = [0.0105, 0.0105, 0.038, 0.038]
    worlds.epoch()
    assert review(slots) == ([], [])
    assert slots.sizes.of(fast) < before


def test_an_exchange_that_takes_long_makes_groups_more_alike():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds)
    before = {share.members: share for share in slots._shares.values()}
    worlds.epoch()
    for job_slot in slots._leaders.values():
        job_slot.report |= {"steps": 10, "exchange_s": 0.4}
    assert review(slots) == ([], [])
    after = {share.members: share for share in slots._shares.values()}
    assert after[2, 3].batch > 1.5 * before[2, 3].batch
    assert after[2, 3].rate > 1.5 * before[2, 3].rate
    assert after[2, 3].step_s == pytest.approx(0.04 * after[2, 3].rows[0] / ROWS + 0.04)


def test_groups_change_when_speeds_have_changed_for_good():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds)
    worlds.seconds = [0.01, 0.04, 0.04, 0.01]
    worlds.epoch()
    assert review(slots) == ([], [])
    worlds.epoch()
    job_slots, retired = review(slots)
    assert sorted(job_slot.members for job_slot in job_slots) == groups_of(slots) == [(0, 3), (1, 2)]
    assert retired == ["all"]
    assert worlds.ended[-2:] == [(0, 1), (2, 3)]


def test_a_new_world_that_does_not_come_up_is_lost_alone():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds)
    worlds.seconds = [0.01, 0.04, 0.04, 0.01]
    worlds.failure[1, 2] = "no more memory"
    worlds.epoch()
    review(slots)
    worlds.epoch()
    job_slots, _ = review(slots)
    assert [job_slot.members for job_slot in job_slots] == groups_of(slots) == [(0, 3)]
    slots._report_losses()
    assert any("no more memory" in str(text) for text in worlds.logged)


def test_groups_do_not_change_for_little_that_is_left():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds)
    slots._cost_s = 10.0
    worlds.seconds = [0.01, 0.04, 0.04, 0.01]
    for _ in range(3):
        worlds.epoch()
        assert review(slots, remaining_s=5.0) == ([], [])


def test_a_group_that_is_gone_is_reported_once_and_the_others_share_the_work():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds)
    next(job_slot for job_slot in slots._leaders.values() if job_slot.members == (2, 3)).gone = True
    worlds.failure[2, 3] = "killed"
    slots._report_losses()
    slots._report_losses()
    assert [text for text in worlds.logged if "is gone" in str(text)] == ["Group 2,3 is gone. killed"]
    assert slots._reason_without_groups() is None
    worlds.epoch()
    review(slots)
    assert groups_of(slots) == [(0, 1)]
    assert [slots.share(worker).rate for worker in slots._shares] == [1.0]


def test_a_group_whose_leader_is_not_yet_known_to_be_gone_leaves_its_tasks_to_others():
    worlds, left = Worlds(0.01, 0.01, 0.04, 0.04), []
    slots = formed(worlds)
    worlds.failure[2, 3] = "a machine is silent"
    leader = slots._leaders[2, 3]
    coordinator = SimpleNamespace(left=lambda worker, reason: left.append((worker, reason)), fail=None)
    for _ in range(2):
        slots.replace_lost(coordinator, 0.0)
    assert left == [(leader.name, "its ring has ended")]
    assert leader.gone


def test_with_the_last_group_the_reason_is_known():
    worlds = Worlds(0.01, 0.01)
    slots = formed(worlds)
    slots._leaders[0, 1].gone = True
    assert slots._reason_without_groups() is None  # its launcher has not ended yet
    worlds.failure[0, 1] = "signal 9"
    assert "signal 9" in slots._reason_without_groups()


def test_a_world_that_does_not_start_reports_the_reason():
    worlds = Worlds(0.01, 0.01)
    worlds.failure[0, 1] = "no such interface"
    with pytest.raises(JobFailed, match="no such interface"):
        group_slots(worlds).start(1)


def test_what_a_rank_raised_names_the_worker_it_is():
    failed = pb.SlotFailed(exception_type="RuntimeError", message="enough", failed_in="rank-1")
    assert SlotError("worker-0", failed, (1, 3)).error["worker"] == "member-3"
    assert SlotError("worker-0", failed).error["worker"] == "rank-1"


def test_members_get_their_rows_and_rate():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots = formed(worlds, batch="fixed")
    worker = next(worker for worker, share in slots._shares.items() if share.members == (2, 3))
    share = slots.share(worker)
    assert (list(share.rows), share.rate) == ([32, 32], pytest.approx(0.4))
    assert slots.share("unknown") == pb.GroupShare()


def test_a_step_is_measured_once_however_often_it_is_reported():
    worlds = Worlds(0.01, 0.01)
    slots = formed(worlds)
    measured = []
    slots._plan.measured = lambda member, rows, seconds: measured.append(member)
    worlds.epoch()
    review(slots)
    fresh = len(measured)
    review(slots)
    assert fresh > 0
    assert len(measured) == fresh


class Coordinator:
    """Coordinator that records which workers leave, and why."""

    def __init__(self):
        self.gone: list[str] = []

    def left(self, worker, reason):
        self.gone.append(worker)

    def retire(self, worker):
        self.gone.append(worker)


@pytest.mark.parametrize(("steps", "launched"), [(0, 1 + MOST_ATTEMPTS), (7, 1 + 2 * MOST_ATTEMPTS)])
def test_a_group_that_never_trains_a_step_is_given_up(steps, launched):
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots, coordinator = formed(worlds), Coordinator()
    for _ in range(2 * MOST_ATTEMPTS):
        if (leader := slots._leaders.get((2, 3))) and not leader.gone:
            leader.report["steps"] = steps
        worlds.failure[2, 3] = "signal 11"
        slots.replace_lost(coordinator, 0.0)
        del worlds.failure[2, 3]
        if (2, 3) not in slots._given_up:
            slots.replace_lost(coordinator, 0.0)
    assert worlds.launched.count((2, 3)) == launched
    assert ((2, 3) in slots._given_up) == (steps == 0)
    assert (0, 1) in groups_of(slots)


def shrunk(worlds: Worlds, **options) -> tuple[GroupsTopology, Coordinator]:
    """Return groups 0,1 and 2,3, of which the second has gone on without member 3."""
    slots, coordinator = formed(worlds, **options), Coordinator()
    worlds.failure[2, 3] = "a machine is silent"
    worlds.awaited[2, 3] = 2
    slots.replace_lost(coordinator, 0.0)
    del worlds.failure[2, 3]
    worlds.free = (2,)
    slots.replace_lost(coordinator, SHRINK_S)
    slots.replace_lost(coordinator, SHRINK_S)
    assert groups_of(slots) == [(0, 1), (2,)]
    worlds.free = ()
    return slots, coordinator


@pytest.mark.parametrize("options", [{}, {"groups": "0,1;2,3"}], ids=["by_speed", "named"])
def test_a_member_that_a_group_went_on_without_joins_it_again_when_there_is_a_slot(options):
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots, coordinator = shrunk(worlds, **options)
    leader, other = slots._leaders[2,], slots._leaders[0, 1]
    slots.review(coordinator, None, 1e6)
    assert groups_of(slots) == [(0, 1), (2,)]
    worlds.free, worlds.awaited = (3,), {(2, 3): 2}
    slots.review(coordinator, None, 1e6)
    assert worlds.launched[-1] == (2, 3)
    assert worlds.ended[-1] == (2,)
    assert (leader.gone, other.gone) == (True, False)
    assert coordinator.gone[-1] == leader.name
    assert groups_of(slots) == [(0, 1)], "the others train meanwhile"
    worlds.awaited = {}
    slots.replace_lost(coordinator, 1.0)
    assert groups_of(slots) == [(0, 1), (2, 3)]
    assert [job_slot.members for job_slot in worlds.admitted] == [(2, 3)]


def test_the_only_group_grows_too():
    """Regression: there was nobody to share the work out to, which ended the job."""
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots, coordinator = shrunk(worlds)
    slots._leaders.pop((0, 1)).gone = True
    slots._rings_of.pop((0, 1))
    worlds.free, worlds.awaited = (3,), {(2, 3): 2}
    slots.review(coordinator, None, 1e6)
    assert slots._living() == ()
    assert slots._reason_without_groups() is None
    worlds.awaited = {}
    slots.replace_lost(coordinator, 1.0)
    assert groups_of(slots) == [(2, 3)]


def test_a_group_that_was_to_grow_goes_on_without_a_slot_that_is_gone_again():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots, coordinator = shrunk(worlds)
    worlds.free, worlds.awaited = (3,), {(2, 3): 2}
    slots.review(coordinator, None, 1e6)
    worlds.free = (2,)
    slots.replace_lost(coordinator, SHRINK_S)
    slots.replace_lost(coordinator, SHRINK_S)
    assert groups_of(slots) == [(0, 1), (2,)]


def test_no_group_grows_for_little_that_is_left():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots, coordinator = shrunk(worlds)
    worlds.free, slots._cost_s = (3,), 10.0
    slots.review(coordinator, None, 15.0)
    assert worlds.launched[-1] == (2,)
    slots.review(coordinator, None, 25.0)
    assert worlds.launched[-1] == (2, 3)


def test_where_groups_stay_on_a_machine_a_member_joins_the_one_on_its_own():
    worlds = Worlds(0.01, 0.01, 0.04, 0.04)
    slots, coordinator = shrunk(worlds)
    slots._plan.network = replace(slots._plan.network, machines=("a", "b", "b", "a"))
    slots._plan.spans_machines, worlds.free = False, (3,)
    slots._leaders.pop((0, 1)).gone = True
    slots._leaders[0,] = worlds.acquire_leader(worlds.claim(SimpleNamespace(members=(0,))))
    slots._rings_of[0,] = slots._rings_of.pop((0, 1))
    assert slots._growing(slots._living(), 1e6) == {(0,): (0, 3)}
