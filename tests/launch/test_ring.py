"""Rings of stand-ins: a launcher is any program that lives until it is told to end."""

from __future__ import annotations

import json
import stat
import sys

import pytest

from nfdt.core.errors import JobFailed
from nfdt.launch.ring import RingLauncher
from nfdt.launch.ring_command import RingShape, Surroundings

WORLD = RingShape(1, "world")  # its "launcher" is the program itself
LIVES = "import time; time.sleep(600)"
DIES = "import sys; print('no such interface', file=sys.stderr); sys.exit(3)"


@pytest.fixture
def make(tmp_path):
    made = []

    def launcher(source: str, *, keeps: bool = True) -> RingLauncher:
        command = [sys.executable, "-c", source]
        found = RingLauncher(
            tmp_path / "rings",
            "127.0.0.1:1",
            "secret",
            keeps=keeps,
            command=command,
            look=lambda: Surroundings(None, 1, False),
        )
        made.append(found)
        return found

    yield launcher
    for one in made:
        for ring in one._rings:
            ring.process.kill()
        one.stop()


def test_the_token_is_in_a_file_of_its_owner_and_not_in_the_command(make):
    ring = make(LIVES).claim("job-1", WORLD)
    token = ring.directory / "token"
    assert token.read_text() == "secret"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert "secret" not in " ".join(ring.command)


def test_a_job_keeps_its_ring_and_the_next_one_takes_it_over(make):
    rings = make(LIVES)
    first = rings.claim("job-1", WORLD)
    assert rings.claim("job-1", WORLD) is first
    rings.release("job-1", usable=True)
    assert first.process.poll() is None
    assert rings.claim("job-2", WORLD) is first


@pytest.mark.parametrize(("keeps", "usable"), [(False, True), (True, False)])
def test_a_ring_ends_with_its_job_where_it_is_not_kept_or_of_no_use(make, keeps, usable):
    rings = make(LIVES, keeps=keeps)
    ring = rings.claim("job-1", WORLD)
    rings.release("job-1", usable=usable)
    assert ring.process.poll() is not None


def test_a_ring_that_is_prepared_is_claimed(make):
    rings = make(LIVES)
    rings.prepare(WORLD)
    assert rings.claim("job-1", WORLD) is rings._rings[0]
    assert len(rings._rings) == 1


def test_a_ring_that_ends_is_explained_by_the_end_of_its_log(make):
    ring = make(DIES).claim("job-1", WORLD)
    why = ring.why(30)
    assert isinstance(why, JobFailed)
    assert "exit code 3" in str(why)
    assert "no such interface" in str(why)


def test_the_rank_that_failed_first_is_reported(make):
    ring = make(LIVES).claim("job-1", WORLD)
    assert ring.report() is None
    (ring.directory / "failure-2.json").write_text(json.dumps({"exception_type": "ValueError", "failed_in": "rank-2"}))
    assert ring.report()["failed_in"] == "rank-2"


def test_a_world_is_not_started_twice(make):
    rings = make(DIES)
    rings.claim("job-1", WORLD).process.wait(30)
    rings.release("job-1", usable=False)
    with pytest.raises(JobFailed, match="Run it again"):
        rings.claim("job-2", WORLD)
