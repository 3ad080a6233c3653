"""Allreduce rings with stand-ins: a launcher is any program that lives until SIGTERM."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest

from nfdt.core.errors import JobFailed
from nfdt.launch.horovod import RingLauncher
from nfdt.launch.horovod_command import HostInfo, RingShape

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
            look=lambda: HostInfo(None, 1, False),
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


RING = RingShape(1, "mpirun")


@pytest.fixture
def mpirun(tmp_path):
    """Provide rings whose launcher is a stand-in that lives until it is ended."""
    program = tmp_path / "mpirun"
    program.write_text(f"#!{sys.executable}\nimport time; time.sleep(600)\n")
    program.chmod(0o700)

    def make():
        server, here = "127.0.0.1:1", HostInfo(str(program), 1, False)
        made.append(RingLauncher(tmp_path / "rings", server, "secret", keeps=False, look=lambda: here))
        return made[-1]

    made = []
    yield make
    for one in made:
        one.stop()


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


def test_only_its_owner_reads_what_a_ring_keeps(mpirun, tmp_path):
    before = os.umask(0)
    try:
        ring = mpirun().claim("job-1", RING)
    finally:
        os.umask(before)
    assert modes(tmp_path / "rings") == {"rings": 0o700, ring.name: 0o700, "token": 0o600, f"{ring.name}.log": 0o600}


def test_a_ring_that_ends_leaves_its_log_only(mpirun, tmp_path):
    rings = mpirun()
    ring = rings.claim("job-1", RING)
    (ring.directory / "failure-0.json").write_text("{}")
    rings.release("job-1", usable=False)
    assert list((tmp_path / "rings").iterdir()) == [ring.log]
    assert "exit code -15" in ring.failure


def test_rings_that_end_with_the_server_leave_their_logs_only(mpirun, tmp_path):
    rings = mpirun()
    logs = {rings.claim(f"job-{i}", RING).log for i in range(2)}
    rings.stop()
    assert set((tmp_path / "rings").iterdir()) == logs


@pytest.mark.mpi
@pytest.mark.parametrize("variable", ["", "orte_tmpdir_base", "orte_local_tmpdir_base"])
def test_session_files_of_mpirun_are_in_a_folder_of_each_ring_unless_the_user_gives_one(
    tmp_path, monkeypatch, variable
):
    """Two starts of one user otherwise share a folder, and one that ends removes it while the other makes its own."""
    if variable:
        monkeypatch.setenv(f"OMPI_MCA_{variable}", str(tmp_path))
    source = """import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--ring") + 1])
print(" ".join([folder.name, *(path.name for path in folder.glob("ompi.*"))]))"""
    command = [sys.executable, "-c", source]
    rings = RingLauncher(tmp_path / "rings", "127.0.0.1:1", "secret", keeps=False, command=command)
    ring = rings.claim("job-1", RING)
    assert ring.process.wait(60) == 0, ring.failure
    assert (f"{ring.name} ompi." in ring.log.read_text()) == (variable != "orte_local_tmpdir_base")
    rings.release("job-1", usable=False)
    assert list((tmp_path / "rings").iterdir()) == [ring.log]


def test_a_world_that_ends_leaves_no_token_and_its_ranks_a_directory_to_wait_for(make):
    rings = make(LIVES, keeps=False)
    ring = rings.claim("job-1", WORLD)
    rings.release("job-1", usable=False)
    assert list(ring.directory.iterdir()) == []


def test_what_the_rings_of_a_killed_server_left_is_removed_by_the_next_one(mpirun, tmp_path):
    ring = mpirun().claim("job-1", RING)
    mpirun()
    assert list((tmp_path / "rings").iterdir()) == [ring.log]


def test_a_ring_that_cannot_be_started_leaves_no_token(mpirun, tmp_path):
    rings = mpirun()
    (tmp_path / "mpirun").unlink()
    with pytest.raises(FileNotFoundError):
        rings.claim("job-1", RING)
    assert list((tmp_path / "rings").rglob("token")) == []


def test_a_world_is_not_started_twice(make):
    rings = make(DIES)
    rings.claim("job-1", WORLD).process.wait(30)
    rings.release("job-1", usable=False)
    with pytest.raises(JobFailed, match="Run it again"):
        rings.claim("job-2", WORLD)
