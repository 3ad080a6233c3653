"""Single decisions at known speeds: leases, shares, batch sizes and reports."""

from __future__ import annotations

from collections import Counter

import pytest

from nfdt.consistency import make_policy
from nfdt.coordinator.decisions import Decisions, slow_exchange, stream_warning
from nfdt.coordinator.membership import Member, Membership
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.coordinator.speed_tracker import batch_sizes
from nfdt.core.work.instructions import TaskTime
from nfdt.schedulers import task_policies
from nfdt.schedulers.group_shares import FixedSizes
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import PlannedTasks
from nfdt.schedulers.tasks import TaskPlan
from nfdt.schedulers.throughput import StepTime
from tests.support.simulated_cluster import job

BATCH = 16
FAST, SLOW = "worker-0", "worker-1"
NAMES = (FAST, SLOW)
TOGETHER = {"overrides": {"tasks": "finish-together"}}


def decisions_of(*seconds: float, preset: str = "asgd", steps: int = 12, **options) -> Decisions:
    """Return the decisions of a job whose workers have done so many steps of these seconds."""
    spec = job(preset, **{"workers": 2, "samples": 1000 * BATCH, "batch_size": BATCH, **options})
    parts = Decisions(spec, make_policy(spec.algorithm))
    for name, step_s in zip(NAMES, seconds, strict=False):
        parts.joined(name)
        step(parts, name, step_s, steps)
    return parts


def step(parts: Decisions, name: str, seconds: float, count: int = 1, exchange_s: float = 0.0) -> None:
    for _ in range(count):
        parts.speeds.stepped(name, parts.speeds.size_of(name), TaskTime(seconds - exchange_s, exchange_s))


def members(now: float = 0.0) -> list[Member]:
    return [Member(name, index, seen_at=now, ready=True) for index, name in enumerate(NAMES)]


def book_of(steps: int) -> LeaseBook:
    return LeaseBook(PlannedTasks(TaskPlan(steps * BATCH, BATCH)))


def lease(parts: Decisions, index: int, steps: int, *, now: float = 0.0, present: list[Member] | None = None) -> int:
    """Return the number of tasks that this worker gets where no worker holds any and so many are left."""
    present = present or members(now)
    return parts.leases.size(present[index], present, book_of(steps), now)


# ---- leases


def test_a_lease_is_one_task_until_the_worker_is_measured_and_a_fifth_of_a_second_then():
    assert lease(decisions_of(0.01, steps=3), 0, steps=1000) == 1
    assert lease(decisions_of(0.01, 0.05), 0, steps=1000) == 20
    assert lease(decisions_of(0.01, 0.05), 1, steps=1000) == 4
    assert lease(decisions_of(0.01, 0.05), 0, steps=12) == 3  # the rest is shared in small pieces


def test_leases_of_thousands_of_workers_last_longer_so_that_few_are_requested_together():
    crowd = [*members(), *(Member(f"worker-{index}", index, seen_at=0.0, ready=True) for index in range(2, 4000))]
    assert lease(decisions_of(0.05), 0, steps=1_000_000, present=crowd) == 80  # 4 s: a thousand requests per second
    assert lease(decisions_of(0.05), 0, steps=1_000_000, present=crowd[:200]) == 4
    assert lease(decisions_of(0.001), 0, steps=100_000_000, present=crowd) == 640
    assert lease(decisions_of(0.05), 0, steps=16_000, present=crowd) == 2  # the rest is shared in small pieces


@pytest.mark.parametrize("preset", ["ssp", "n-softsync", "bsp"])
def test_a_policy_limits_leases(preset):
    assert lease(decisions_of(0.01, 0.01, preset=preset), 0, steps=1000) == 1


def test_batches_that_are_fed_are_leased_one_by_one():
    assert lease(decisions_of(0.01, 0.01, stream=True), 0, steps=1000) == 1


def test_what_is_left_is_shared_so_that_all_end_together():
    """Case: 5 steps of 0.1 s against one of 0.5 s."""
    parts = decisions_of(0.1, 0.5, **TOGETHER)
    assert lease(parts, 1, steps=6) == 1
    assert lease(parts, 1, steps=4) == 0  # the other worker has finished them earlier
    assert lease(parts, 0, steps=4) == 1
    assert lease(decisions_of(0.1, 0.5), 1, steps=4) == 1


def test_the_rest_is_divided_among_hundreds_of_workers_once_in_several_leases(monkeypatch):
    divided = []
    share = task_policies.steps_to_share
    monkeypatch.setattr(task_policies, "steps_to_share", lambda *given: divided.append(given) or share(*given))
    parts, crowd = decisions_of(**TOGETHER), []
    for index in range(640):
        crowd.append(Member(f"worker-{index}", index, seen_at=0.0, ready=True))
        parts.joined(crowd[-1].name)
        step(parts, crowd[-1].name, 0.2 if index % 2 else 0.8, 12)
    book, given = book_of(700), Counter[str]()
    for now in (0.0, 0.2, 0.4, 0.6):
        for member in crowd:
            if (size := parts.leases.size(member, crowd, book, now)) and book.remaining:
                member.leased_at, member.free_at = now, now + (0.2 if member.index % 2 else 0.8)
                given[member.name] += len(issued := book.issue(member.name, size))
                for task in issued:
                    book.finish(member.name, task.task)
    assert not book.remaining
    assert sum(given.values()) == 700
    fast, slow = (sum(count for name, count in given.items() if int(name[7:]) % 2 == odd) for odd in (1, 0))
    assert fast > 2 * slow
    assert len(divided) <= 4 * 640 / 10  # of all requests, by ten times as many workers as are exact


def test_a_worker_of_unknown_speed_gets_a_single_step_near_the_end():
    parts = decisions_of(0.1, 0.5, steps=4, **TOGETHER)
    assert [lease(parts, index, steps=2) for index in (0, 1)] == [1, 1]
    parts = decisions_of(0.001, **TOGETHER)  # the second worker is new
    assert lease(parts, 1, steps=4) == 1


def test_a_worker_that_asks_is_free_and_a_silent_one_may_stay_so_as_long_again():
    parts = decisions_of(0.1, 0.5, **TOGETHER)
    now = 100.0
    present = members(now)
    present[1].leased_at = now
    assert lease(parts, 1, steps=4, now=now, present=present) == 0
    present[0].seen_at = 90.0  # the fast worker has been silent for ten seconds
    assert lease(parts, 1, steps=4, now=now, present=present) == 1
    assert lease(parts, 0, steps=4, now=now, present=present) == 1  # a worker that asks is present


def test_a_worker_that_holds_tasks_is_free_after_them():
    parts = decisions_of(0.1, 0.5, **TOGETHER)
    present, book = members(), book_of(14)
    book.issue(FAST, 10)  # a second of work
    assert parts.leases.size(present[1], present, book, 0.0) == 1
    present[0].in_flight = frozenset(task.task for task in book.held(FAST))  # all of it is on its way already
    assert parts.leases.size(present[1], present, book, 0.0) == 0


def test_a_worker_without_leases_gets_one_to_be_measured_again():
    parts = decisions_of(0.1, 0.5, **TOGETHER)
    assert lease(parts, 1, steps=4, now=9.9) == 0
    assert lease(parts, 1, steps=4, now=10.1) == 1  # 20 of its own steps after its last lease
    present = members(10.1)
    present[1].leased_at = 5.0
    assert lease(parts, 1, steps=4, now=10.1, present=present) == 0


# ---- requests ahead of the end of a lease


def looks_ahead(parts, steps_left, index=0, leased=4):
    present, book = members(), book_of(steps_left)
    parts.leases.size(present[index], present, book, 0.0)
    return parts.leases.looks_ahead(present[index], leased, book)


def test_a_worker_looks_ahead_until_fewer_than_two_of_its_steps_are_left_after_its_lease():
    """Case: 60 steps per second together; the lease takes 0.08 s, and two more steps 0.04 s."""
    parts = decisions_of(0.02, 0.1)
    assert looks_ahead(parts, 8)  # 0.13 s
    assert not looks_ahead(parts, 7)
    assert not looks_ahead(parts, 34, index=1)  # 4 + 2 steps of 0.1 s
    assert looks_ahead(parts, 38, index=1)


def test_a_worker_of_unknown_speed_does_not_look_ahead():
    assert not looks_ahead(decisions_of(), 1000)


@pytest.mark.parametrize(("preset", "ahead"), [("n-softsync", True), ("ssp", False), ("bsp", False)])
def test_policies_that_decide_on_finished_steps_forbid_looking_ahead(preset, ahead):
    assert looks_ahead(decisions_of(0.02, 0.02, preset=preset), 1000, leased=1) is ahead


def test_batches_that_are_fed_are_not_requested_ahead():
    assert not looks_ahead(decisions_of(0.02, 0.02, stream=True), 1000, leased=1)


def test_a_worker_that_asks_before_its_step_ends_gets_what_it_can_finish_after_it():
    parts = decisions_of(0.1, 0.5, **TOGETHER)
    present = members()
    assert lease(parts, 1, steps=6, present=present) == 1
    present[1].free_at = 0.5
    assert lease(parts, 1, steps=6, present=present) == 0  # the other worker has finished them by then
    assert lease(parts, 0, steps=8, present=present) == 2


# ---- shares


def test_static_shares_are_equal_and_others_follow_speed_once_all_are_measured():
    static = {"overrides": {"tasks": "static"}}
    proportional = {"overrides": {"tasks": "proportional"}}
    assert decisions_of(**static).leases.shares(NAMES) == {FAST: 1.0, SLOW: 1.0}
    assert decisions_of(0.1, 0.4, steps=9, **proportional).leases.shares(NAMES) is None
    shares = decisions_of(0.1, 0.4, steps=10, **proportional).leases.shares(NAMES)
    assert shares == {FAST: pytest.approx(160), SLOW: pytest.approx(40)}


@pytest.mark.parametrize(
    "other",
    [{"overrides": {"tasks": "dynamic"}}, TOGETHER, {"preset": "bsp", "overrides": {"tasks": "static"}}],
    ids=["dynamic", "finish-together", "bsp"],
)
def test_other_epochs_are_not_divided(other):
    parts = decisions_of(0.1, 0.4, **other)
    assert not parts.leases.divides
    assert parts.leases.shares(NAMES) is None


def test_a_stream_is_not_divided():
    assert decisions_of(0.1, 0.4, stream=True, overrides={"tasks": "static"}).leases.shares(NAMES) is None


# ---- batch sizes


def test_batches_follow_speed_within_the_jobs_bounds():
    spec = job(batch_size=BATCH, overrides={"batch": "dbs", "batch_min": 8, "batch_max": 20, "batch_multiple": 4})
    bounds = batch_sizes(spec).bounds
    assert (bounds.least, bounds.most, bounds.multiple) == (8, 20, 4)
    parts = decisions_of(0.1, 0.4, overrides={"batch": "dbs"})
    assert parts.speeds.size_of(FAST) > BATCH > parts.speeds.size_of(SLOW)
    parts.left(SLOW)
    assert parts.speeds.size_of(FAST) == BATCH
    assert decisions_of(0.1, 0.4).speeds.size_of(FAST) == BATCH
    assert batch_sizes(job(stream=True, overrides={"batch": "dbs"})) is None


@pytest.mark.parametrize(
    ("option", "warning"),
    [
        ({"batch": "dbs"}, "batch='dbs': the data come in whole batches; they keep the size"),
        ({"tasks": "finish-together"}, "tasks='finish-together': the client feeds the batches one by one"),
        ({"tasks": "proportional"}, "tasks='proportional': the client feeds"),
    ],
)
def test_options_without_effect_on_a_stream_are_reported(option, warning):
    assert stream_warning(job(stream=True, overrides=option)).startswith(warning)
    assert stream_warning(job(overrides=option)) is None
    assert stream_warning(job(stream=True)) is None


# ---- reports


def test_a_speed_is_reported_when_it_is_known_and_again_when_it_has_moved():
    parts = decisions_of(0.1, 0.4, steps=3)
    assert parts.speeds.report(NAMES) is None
    step(parts, FAST, 0.1, 9, exchange_s=0.025)
    row = {"samples_per_s": 160.0, "step_s": 0.1, "step_exchange_s": 0.025, "batch_size": BATCH}
    assert parts.speeds.report(NAMES) == {FAST: row}
    assert parts.speeds.report(NAMES) is None
    step(parts, FAST, 0.105, 20, exchange_s=0.025)
    assert parts.speeds.report(NAMES) is None
    step(parts, FAST, 0.2, 20, exchange_s=0.025)
    assert parts.speeds.report(NAMES)[FAST]["samples_per_s"] == 80.0
    step(parts, FAST, 0.1, 20, exchange_s=0.025)
    assert parts.speeds.report(NAMES)[FAST]["samples_per_s"] == 160.0


def test_speeds_are_reported_in_thousandths_of_samples_and_in_microseconds():
    parts = decisions_of()
    step(parts, FAST, 0.0123456, 12, exchange_s=0.00123456)
    row = {"samples_per_s": 1296.008, "step_s": 0.012346, "step_exchange_s": 0.001235, "batch_size": BATCH}
    assert parts.speeds.describe([FAST]) == {FAST: row}


def test_another_batch_size_is_reported():
    parts = decisions_of(0.1, 0.1)
    assert parts.speeds.report(NAMES)
    parts.renew(job(workers=2), sizes := FixedSizes(BATCH))
    sizes.state({SLOW: BATCH + 1})
    assert parts.speeds.report(NAMES)[SLOW]["batch_size"] == BATCH + 1
    assert parts.speeds.report(NAMES) is None


def test_a_worker_that_is_gone_keeps_its_description():
    parts = decisions_of(0.1, 0.4)
    assert set(parts.speeds.describe(NAMES)) == set(NAMES)
    parts.left(SLOW)
    assert set(parts.speeds.describe([FAST])) == {FAST}
    assert parts.speeds.described[SLOW]["step_s"] == 0.4


def test_a_worker_that_comes_back_is_measured_anew():
    parts = decisions_of(0.01, 0.05)
    parts.left(FAST)
    parts.joined(FAST)
    assert [lease(parts, index, steps=1000) for index in (0, 1)] == [1, 4]


def test_speeds_may_be_reported_once_a_second():
    parts = decisions_of()
    for now, due in ((0.0, True), (0.9, False), (1.0, True), (1.5, False), (2.0, True)):
        assert parts.speeds.throttle.is_due(now) == due


# ---- plans


def looks(parts: Decisions, workers: int) -> bool:
    """Whether the plan is reviewed after one more report."""
    due = parts.plan.reported(workers)
    if due:
        parts.plan.look(())
    return due


def test_a_job_that_plans_looks_once_in_as_many_reports_as_it_has_workers():
    parts = decisions_of(preset="auto")
    assert [looks(parts, 3) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [looks(decisions_of(), 1) for _ in range(3)] == [False] * 3


def test_a_plan_waits_until_every_worker_is_measured_and_is_made_once():
    parts = decisions_of(0.02, 0.02, preset="auto", steps=9)
    assert parts.plan.look(NAMES) is None
    assert parts.plan.look_at_groups(NAMES, ShardLoad(0.01, 0.15), 1e6) is None
    step(parts, FAST, 0.02)
    assert parts.plan.look(NAMES) is None
    step(parts, SLOW, 0.02)
    assert parts.plan.look(NAMES)["row"] == {"topology": "flat", "batch": "dbs", "overlap": 0}
    assert parts.plan.overlap == 0
    assert parts.plan.look(NAMES) is None


def test_an_exchange_worth_hiding_is_hidden_from_then_on():
    parts = decisions_of(preset="auto", overrides={"overlap": 1})
    assert parts.plan.overlap == 0  # until the gain is known
    for name in NAMES:
        step(parts, name, 0.04, 12, exchange_s=0.02)
    assert parts.plan.look(NAMES)["row"]["overlap"] == 1
    assert parts.plan.overlap == 1


def test_groups_are_planned_for_workers_that_are_all_known():
    parts = decisions_of(preset="auto")
    for name in NAMES:
        step(parts, name, 0.2, 12, exchange_s=0.19)
    assert parts.plan.look_at_groups(NAMES, ShardLoad(0.01, 0.0), 1e6) is None  # no preset is chosen yet
    assert parts.plan.look(NAMES)
    load = ShardLoad(0.09, 0.1)
    assert parts.plan.look_at_groups(NAMES, load, 1e6).preset.groups == ((0, 1),)
    assert parts.plan.look_at_groups(NAMES, load, 1.0) is None
    assert parts.plan.look_at_groups([*NAMES, "new"], load, 1e6) is None


def test_a_job_that_goes_on_as_groups_plans_no_more():
    parts = decisions_of(0.02, 0.02, preset="auto", overrides={"overlap": 1})
    assert parts.plan.look(NAMES)
    spec = job("group-sync", workers=1, batch_size=4)
    parts.renew(spec, sizes := FixedSizes(4))
    assert (parts.speeds.sizes, parts.plan.overlap) == (sizes, 0)
    assert not looks(parts, 1)
    assert parts.plan.look(NAMES) is None
    assert parts.plan.look_at_groups(NAMES, ShardLoad(0.09, 0.1), 1e6) is None
    assert parts.speeds.size_of("new") == 4


@pytest.mark.parametrize(
    ("preset", "exchange_s", "warns"),
    [
        ("ddc-asgd", 0.6, True),
        ("ddc-asgd", 0.4, False),
        ("auto", 0.6, True),
        ("bsp", 0.6, False),
        ("local-ddc", 0.6, False),
    ],
)
def test_a_job_that_mostly_exchanges_is_told_once_what_helps(preset, exchange_s, warns):
    parts = decisions_of(preset=preset)
    present = Membership(2, 0.0)
    for index, name in enumerate(NAMES):
        present.set_ready(present.join(name, index, 0.0))
    events = []
    for count in range(30):
        for name in NAMES:
            step(parts, name, 1.0, 1, exchange_s)
        events += list(parts.changes(present, 2.0 * count))
    texts = [data["text"] for kind, data in events if kind == "log"]
    assert len(texts) == warns
    assert all("0.6 of the 1 s" in text and "local-ddc" in text for text in texts)
    expected = {"exchange_s": pytest.approx(0.6), "step_s": pytest.approx(1.0)}
    assert parts.slow_links(NAMES, ShardLoad(0.0, 0.0)) == (expected if preset == "auto" else None)
    assert parts.slow_links(NAMES, ShardLoad(0.1, 0.2)) is None, "they wait for a shard, not for links"


@pytest.mark.parametrize(
    ("preset", "options", "rounds"),
    [
        ("local-ddc", {}, 31),  # 1000 batches an epoch; 16 and 16 steps a round
        ("local-ddc", {"epochs": 2}, None),
        ("local-ddc", {"epochs": 2, "steps_per_epoch": 160}, 10),
        ("local-ddc", {"workers": 1}, None),
        ("diloco", {}, 31),
        ("asgd", {}, None),
    ],
)
def test_a_training_of_few_exchanges_is_told_once_what_helps(preset, options, rounds):
    parts = decisions_of(preset=preset, **options)
    names, events = NAMES[: options.get("workers", 2)], []
    present = Membership(len(names), 0.0)
    for index, name in enumerate(names):
        present.set_ready(present.join(name, index, 0.0))
        parts.joined(name)
    for count in range(3):
        for name in names:
            step(parts, name, 1.0)
            events += list(parts.changes(present, 2.0 * count))
    texts = [data["text"] for kind, data in events if kind == "log"]
    assert [f"about {rounds} times" in text for text in texts] == ([] if rounds is None else [True])


def test_slow_workers_make_fewer_local_steps_and_more_rounds():
    parts = decisions_of(preset="local-ddc", epochs=2)
    for name, step_s in zip(NAMES, (1.0, 4.0), strict=True):
        parts.joined(name)
        step(parts, name, step_s * parts.speeds.size_of(name) / BATCH)
    sizes = parts.speeds.sizes
    assert sizes.rounds(2000 * BATCH) == 100, "16 and 4 steps a round"


def test_short_exchanges_are_no_slow_links():
    steps = {FAST: (StepTime(0.0, 0.01 / BATCH), 0.009)}
    assert slow_exchange(job("ddc-asgd", workers=1, samples=100, batch_size=BATCH), steps) is None
