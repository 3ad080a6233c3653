"""Records of a job in the store."""

from __future__ import annotations

import pytest

from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.jobserver.job_log import JobLog


@pytest.fixture
def artifacts(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    store.add("job", "{}", session="", owner="")
    yield store
    store.close()


def test_a_checkpoint_takes_the_place_of_the_one_before(store, artifacts):
    job_log = JobLog(store, artifacts, "job", frozenset())
    first, second = artifacts.put(b"first"), artifacts.put(b"second")
    job_log.checkpoint(first, 1)
    job_log.checkpoint(second, 1)
    assert (artifacts.has(first), artifacts.has(second)) == (False, True)
    assert store.get("job").checkpoint_artifact == second


def test_a_checkpoint_that_is_the_same_as_the_one_before_stays(store, artifacts):
    job_log = JobLog(store, artifacts, "job", frozenset())
    same = artifacts.put(b"same")
    job_log.checkpoint(same, 1)
    job_log.checkpoint(same, 1)
    assert artifacts.has(same)


def test_a_checkpoint_that_is_what_the_job_began_with_is_kept(store, artifacts):
    start, later = artifacts.put(b"start"), artifacts.put(b"later")
    job_log = JobLog(store, artifacts, "job", frozenset({start}))
    job_log.checkpoint(start, 1)
    job_log.checkpoint(later, 1)
    assert artifacts.has(start)
