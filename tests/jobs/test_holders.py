"""Lines of token files, the rights of roles, and quotas."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from nfdt.core.errors import PolicyRefused, UsageError
from nfdt.core.jobs.admission import Limits, check_quotas
from nfdt.core.jobs.rights import AuditLog, Holder, Holders, ensure_token_file, read_tokens
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
    assert len(holder.owner) == 16
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
        (f"vision train {SECRET} jobs=2=3", "Received: jobs=2=3."),
        (f"vision train {SECRET} gpus=2 jobs=x", "Received: gpus=2, jobs=x."),
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


def test_the_shortest_token_has_eight_characters():
    assert Holder.parse("12345678").secret == "12345678"
    with pytest.raises(UsageError, match="a line of 1 words, 7 characters"):
        Holder.parse("1234567")
    with pytest.raises(UsageError, match="a line of 2 words, 0 characters"):
        Holder.parse(f"vision {SECRET}")


def test_a_call_beyond_a_role_is_refused_with_holder_and_role():
    Holder(SECRET, "vision", "train").check_call(methods(JOBS)["Submit"])
    with pytest.raises(PolicyRefused, match="^Submit: .* the token of vision, whose role is read"):
        Holder(SECRET, "vision", "read").check_call(methods(JOBS)["Submit"])


def test_a_token_file_is_made_once_and_is_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "token"
    made = ensure_token_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(made[0]) == 64
    assert ensure_token_file(path) == read_tokens(path) == made
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(UsageError, match=f"{mode:04o}"):
            read_tokens(path)


def test_a_token_file_may_have_comments_and_must_be_readable_text(tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_bytes(b"\n# of the team\n  " + SECRET.encode() + b"\n\n")
    assert read_tokens(path) == (SECRET,)
    for content, reason in ((b"short", "at least 8"), (b"\xff\xfe", "no UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            read_tokens(path)
    with pytest.raises(UsageError, match="No such file"):
        read_tokens(tmp_path / "none")
    with pytest.raises(UsageError, match="No such file"):
        ensure_token_file(tmp_path / "none" / "token")


def test_the_audit_log_names_who_did_what_and_is_appended_to(tmp_path):
    path = tmp_path / "audit.jsonl"
    for job in ("job-1", ""):
        log = AuditLog(path, now=lambda: 86400.0)
        log.write("submit", Holder(SECRET, "vision", "train"), "192.0.2.1", job, name="a")
        log.close()
    first, second = map(json.loads, path.read_text().splitlines())
    same = {"action": "submit", "who": "vision", "role": "train", "from": "192.0.2.1", "name": "a"}
    assert first == {"at": "1970-01-02T00:00:00Z", **same, "job": "job-1"}
    assert second == {"at": "1970-01-02T00:00:00Z", **same}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in path.read_text()


def test_an_audit_log_that_cannot_be_written_is_refused_or_told(tmp_path, caplog):
    with pytest.raises(UsageError, match="Is a directory"):
        AuditLog(tmp_path)
    log = AuditLog(Path("/dev/full"))
    log.write("submit", Holder(SECRET, "vision"), "192.0.2.1", "job-1")
    log.close()
    assert "No space left on device" in caplog.text
    assert "job-1" in caplog.text


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


def test_a_job_that_no_quota_ever_admits_is_refused():
    holder = Holder(SECRET, "vision", "train", jobs=2, workers=8)
    check_quotas(Job(8), 63, holder, Limits())
    with pytest.raises(PolicyRefused, match="workers=9: expected at most 8, the quota of vision"):
        check_quotas(Job(9), 0, holder, Limits())
    with pytest.raises(PolicyRefused, match="workers=1: expected at most 0"):
        check_quotas(Job(1), 0, Holder(SECRET, "vision", "train", jobs=0), Limits())
    with pytest.raises(PolicyRefused, match="at most 1"):
        check_quotas(Job(1), 1, Holder(SECRET), Limits(jobs_per_token=1))


def test_quotas_belong_to_owners_and_the_least_counts():
    lines = ["vision train aaaaaaaaaa jobs=2 workers=9", "vision train bbbbbbbbbb workers=8", "vision read cccccccccc"]
    assert Holders([*lines, "dddddddddd"]).quotas() == {
        "vision": {"jobs": 2, "workers": 8},
        Holder("dddddddddd").owner: {},
    }
