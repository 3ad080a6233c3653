"""Events are read from a server's state directory while it writes them."""

from __future__ import annotations

import json

import pytest

from nfdt.chaos.accounting import RecordedJobs
from nfdt.core.jobs.store import JobStore

SPEC = json.dumps({"train": {"kind": "arrays", "samples": 40}, "fit": {}})


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    yield store
    store.close()


def test_a_directory_without_a_server_has_no_events(tmp_path):
    assert not RecordedJobs(tmp_path / "nothing").read()


def test_new_events_are_added_once(tmp_path, store):
    recorded = RecordedJobs(tmp_path)
    store.add("job-1", SPEC, session="s", owner="o")
    assert recorded.read()
    store.append("job-1", "progress", {"epoch": 0, "steps": 1, "samples": 10, "logs": {}})
    store.transition("job-1", "starting")
    assert recorded.read()
    assert not recorded.read()
    (job,) = recorded.jobs
    assert [event.kind for event in job.events] == ["state", "progress", "state"]
    assert (job.samples, job.state) == (40, "starting")


def test_jobs_come_in_the_order_of_their_submission(tmp_path, store):
    for name in ("job-z", "job-a"):
        store.add(name, SPEC, session="s", owner="o")
    recorded = RecordedJobs(tmp_path)
    recorded.read()
    assert [job.job_id for job in recorded.jobs] == ["job-z", "job-a"]


def test_a_file_that_is_no_database_has_no_events(tmp_path):
    (tmp_path / "jobs.sqlite").write_text("x" * 1000)
    assert not RecordedJobs(tmp_path).read()
