"""Private files, and folders that show whether their owner is alive."""

import fcntl
import os
import stat
import subprocess
import sys

import pytest

from nfdt.core.host.private_files import LOCK, make_folder, private, replacing, sweep

PREFIX = "nfdt-test-"


@pytest.fixture
def make(tmp_path):
    """Make a folder; its lock is held until the test closes it."""
    locks = []

    def made():
        folder, lock = make_folder(PREFIX, tmp_path)
        locks.append(os.dup(lock))
        os.close(lock)
        return folder, locks[-1]

    return made


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_its_owners_only(tmp_path):
    before = os.umask(0)
    try:
        with open(tmp_path / "secret", "w", opener=private) as file:
            file.write("x")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "secret") == 0o600


def test_a_folder_and_its_lock_are_its_owners_only(make):
    folder, _ = make()
    assert (mode_of(folder), mode_of(folder / LOCK)) == (0o700, 0o600)


def test_a_folder_stays_while_its_owner_lives_and_is_swept_after(make, tmp_path):
    folder, lock = make()
    (folder / "data").mkdir()
    (folder / "data" / "rows").write_text("1")
    assert sweep(PREFIX, tmp_path) == []
    assert (folder / "data" / "rows").exists()
    os.close(lock)
    assert sweep(PREFIX, tmp_path) == [folder]
    assert not folder.exists()


def test_a_folder_stays_while_a_process_that_was_handed_its_lock_lives(make, tmp_path):
    folder, lock = make()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert sweep(PREFIX, tmp_path) == []
    child.kill()
    child.communicate()
    assert sweep(PREFIX, tmp_path) == [folder]


def test_a_folder_of_another_user_stays(make, tmp_path, monkeypatch):
    folder, lock = make()
    os.close(lock)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert sweep(PREFIX, tmp_path) == []
    assert folder.exists()


def test_what_is_no_such_folder_stays(make, tmp_path):
    outside = tmp_path / "outside"
    make_folder(outside.name, tmp_path)
    (tmp_path / f"{PREFIX}plain").mkdir()
    (tmp_path / f"{PREFIX}state").mkdir()
    (tmp_path / f"{PREFIX}state" / "lock").touch()  # of a job server
    (tmp_path / f"{PREFIX}file").touch()
    folder, lock = make()
    os.close(lock)
    (tmp_path / f"{PREFIX}link").symlink_to(folder.rename(outside))
    (tmp_path / f"{PREFIX}linked-lock").mkdir()
    (tmp_path / f"{PREFIX}linked-lock" / LOCK).symlink_to(outside / LOCK)
    before = sorted(tmp_path.rglob("*"))
    assert sweep(PREFIX, tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_swept_before_its_lock_is_held_is_made_again(tmp_path, monkeypatch):
    flock = fcntl.flock

    def sweep_first(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        assert len(sweep(PREFIX, tmp_path)) == 1
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    folder, _ = make_folder(PREFIX, tmp_path)
    assert sorted(tmp_path.iterdir()) == [folder]
    assert sweep(PREFIX, tmp_path) == []


def test_a_file_is_replaced_as_a_whole_and_is_its_owners_only(tmp_path):
    target = tmp_path / "rows"
    target.write_text("old")
    with replacing(target) as file:
        file.write(b"new")
        assert target.read_text() == "old"
    assert (target.read_text(), mode_of(target)) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_is_not_written_to_its_end_leaves_nothing(tmp_path):
    def write_half():
        with replacing(tmp_path / "rows") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    program = f"""
from pathlib import Path
from nfdt.core.host.private_files import replacing
with replacing(Path({str(tmp_path / "left")!r})) as file:
    print(flush=True)
    input()
"""
    pipe = subprocess.PIPE
    killed = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe)
    killed.stdout.readline()
    with replacing(tmp_path / "living"):
        assert len(list(tmp_path.iterdir())) == 2
        killed.kill()
        killed.communicate()
        with replacing(tmp_path / "next"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["living", "next"]
