"""Lines of token files, the rights of roles, and quotas."""

from __future__ import annotations

import pytest

from nfdt.core.errors import PolicyRefused, UsageError
from nfdt.core.jobs.admission import Limits, check_quotas
from nfdt.core.jobs.rights import Holder, Holders
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.wire import jobs_pb2, workers_pb2

SECRET = "0123456789abcdef"
JOBS = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"]
WORKERS = workers_pb2.DESCRIPTOR.services_by_name["Workers"]
READING = {"Describe", "Download", "List", "OpenPage", "Show", "Slots", "Trace", "Watch"}


def test_a_secret_alone_is_an_administrator_s():
    holder = Holder.parse(SECRET)
    assert (holder.role, holder.name, holder.jobs, holder.workers) == ("admin", "", None, None)
    assert holder.owner == Holder.parse(SECRET).owner != Holder.parse(SECRET + "0").owner
    assert SECRET not in holder.owner
    assert SECRET not in repr(holder)


def test_a_line_names_its_holder_the_role_and_quotas():
    holder = Holder.parse(f"vision  train {SECRET} workers=8 jobs=2")
    assert (holder.owner, holder.role, holder.jobs, holder.workers) == ("vision", "train", 2, 8)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("short", "at least 8 characters"),
        (f"vision {SECRET}", "NAME read|train|work|admin TOKEN"),
        ("vision train short", "at least 8 characters"),
        (f"vision boss {SECRET}", "expected a role of read, train, work, admin. Received: boss"),
        (f"vision train {SECRET} gpus=2", "gpus=2"),
        (f"vision train {SECRET} jobs=-1", "jobs=-1"),
        (f"vision train {SECRET} jobs", "jobs="),
    ],
)
def test_a_line_that_means_nothing_is_refused_without_its_secret(line, reason):
    with pytest.raises(UsageError) as caught:
        Holder.parse(line)
    assert reason in str(caught.value)
    assert SECRET not in str(caught.value)


def test_no_token_and_the_same_token_twice_are_refused():
    with pytest.raises(UsageError, match="Received: none"):
        Holders([])
    with pytest.raises(UsageError, match="twice"):
        Holders([SECRET, f"vision read {SECRET}"])


def test_an_unknown_token_has_no_holder():
    holders = Holders([f"vision read {SECRET}"])
    assert holders.find(SECRET).name == "vision"
    assert holders.find(SECRET + "0") is None
    assert holders.find("") is None


def methods(service) -> dict[str, str]:
    return {method.name: f"/{service.full_name}/{method.name}" for method in service.methods}


@pytest.mark.parametrize(
    ("role", "jobs", "workers"),
    [
        ("read", READING, set()),
        ("train", set(methods(JOBS)), set()),
        ("work", {"Describe"}, set(methods(WORKERS))),
        ("admin", set(methods(JOBS)), set(methods(WORKERS))),
    ],
)
def test_a_role_includes_these_methods(role, jobs, workers):
    holder = Holder(SECRET, "vision", role)
    assert {name for name, method in methods(JOBS).items() if holder.may_call(method)} == jobs
    assert {name for name, method in methods(WORKERS).items() if holder.may_call(method)} == workers
    assert holder.may_call("/grpc.health.v1.Health/Watch")


def test_jobs_are_seen_by_their_owner_and_administrators():
    assert Holder(SECRET, "vision", "read").sees("vision")
    assert not Holder(SECRET, "vision", "train").sees("speech")
    assert Holder(SECRET, "ops", "admin").sees("speech")


class Job:
    def __init__(self, workers: int) -> None:
        self.cluster = ClusterSpec(workers=workers)


def test_quotas_limit_jobs_and_workers():
    holder = Holder(SECRET, "vision", "train", jobs=2, workers=8)
    check_quotas(Job(8), [], holder, Limits())
    check_quotas(Job(3), [Job(5)], holder, Limits())
    with pytest.raises(PolicyRefused, match="workers=4: expected at most 3, as 5 of the 8 workers of vision"):
        check_quotas(Job(4), [Job(5)], holder, Limits())
    with pytest.raises(PolicyRefused, match="at most 2"):
        check_quotas(Job(1), [Job(1), Job(1)], holder, Limits())
    with pytest.raises(PolicyRefused, match="at most 1"):
        check_quotas(Job(1), [Job(1)], Holder(SECRET), Limits(jobs_per_token=1))
