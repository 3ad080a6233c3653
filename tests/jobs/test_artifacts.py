import hashlib
import os
import shutil
import stat
import time
from types import SimpleNamespace

import pytest

from nfdt.core.errors import PolicyRefused, ProtocolError, UsageError
from nfdt.core.jobs.artifacts import EVICT_AFTER_S, EXPIRE_EVERY_S, FILE_BYTES, ORPHAN_S, ArtifactStore


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


DATA = b"0123456789"
NAME = sha(DATA)


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "artifacts")


def test_what_is_put_is_read(store):
    assert store.put(DATA) == NAME
    assert store.read(NAME) == DATA
    assert stat.S_IMODE(store.path(NAME).stat().st_mode) == 0o600


def test_an_upload_in_chunks_arrives(store):
    assert store.receive(NAME, 10, 0, [(0, DATA[:4]), (4, DATA[4:])]) == 10
    assert store.read(NAME) == DATA


def test_a_broken_upload_resumes_where_it_stopped(store):
    with pytest.raises(ProtocolError, match="Resume"):
        store.receive(NAME, 10, 0, [(0, DATA[:4])])
    assert not store.has(NAME)
    assert store.have_bytes(NAME) == 4
    store.receive(NAME, 10, 4, [(4, DATA[4:])])
    assert store.read(NAME) == DATA


def test_an_upload_may_begin_again_from_zero(store):
    with pytest.raises(ProtocolError):
        store.receive(NAME, 10, 0, [(0, DATA[:4])])
    store.receive(NAME, 10, 0, [(0, DATA)])
    assert store.read(NAME) == DATA


def test_what_one_owner_began_spoils_no_upload_of_another(store):
    with pytest.raises(ProtocolError, match="Resume"):
        store.receive(NAME, 10, 0, [(0, b"9876")], "mallory")
    assert store.have_bytes(NAME, "mallory") == 4
    assert store.have_bytes(NAME, "alice") == 0
    store.receive(NAME, 10, 0, [(0, DATA)], "alice")
    assert store.read(NAME) == DATA


def test_an_upload_that_one_owner_holds_open_delays_no_other(store):
    def slowly():
        yield 0, DATA[:4]
        store.receive(NAME, 10, 0, [(0, DATA)], "alice")
        yield 4, DATA[4:]

    store.receive(NAME, 10, 0, slowly(), "mallory")
    assert store.read(NAME) == DATA
    assert store.room() == ArtifactStore(store.root).room()  # it is counted once


def test_uploads_that_no_job_names_take_half_of_the_free_room(tmp_path):
    store = ArtifactStore(tmp_path / "a", quota_bytes=8 * FILE_BYTES)

    def upload(number, owner="bob", limited=True):
        data = bytes([number]) * FILE_BYTES
        store.receive(sha(data), len(data), 0, [(0, data)], owner, limited=limited)
        return sha(data)

    first = [upload(number) for number in range(3)]
    with pytest.raises(PolicyRefused, match="no job names"):
        upload(3)
    store.claim(first)
    upload(3)  # a job names the others
    upload(4)
    with pytest.raises(PolicyRefused, match="no job names"):
        upload(5)
    upload(6, owner="alice")
    upload(7, owner="root", limited=False)


def test_small_files_count_for_the_disk_s_number_of_files(tmp_path):
    store = ArtifactStore(tmp_path / "a", quota_bytes=8 * FILE_BYTES)
    for number in range(3):
        store.receive(sha(bytes([number])), 1, 0, [(0, bytes([number]))], "bob", limited=True)
    with pytest.raises(PolicyRefused, match="no job names"):
        store.receive(NAME, 10, 0, [(0, DATA)], "bob", limited=True)


def test_what_no_job_names_expires(tmp_path):
    clock = [0.0]
    store = ArtifactStore(tmp_path / "a", now=lambda: clock[0])
    named, orphan = store.put(b"named"), store.put(b"orphan")
    with pytest.raises(ProtocolError, match="Resume"):
        store.receive(NAME, 10, 0, [(0, DATA[:4])], "bob", limited=True)
    began = store.path(named).stat().st_mtime
    clock[0] = began + ORPHAN_S - 60
    store.expire(lambda: {named})
    assert store.has(orphan)
    clock[0] = began + ORPHAN_S + 1
    store.expire(lambda: pytest.fail("looked for files twice in an hour"))
    clock[0] = began + ORPHAN_S + EXPIRE_EVERY_S
    store.expire(lambda: {named})
    assert [file.name for file in store.root.iterdir()] == [named]


def test_what_a_client_asks_for_is_young_again(tmp_path):
    clock = [time.time()]
    store = ArtifactStore(tmp_path / "a", now=lambda: clock[0])
    name = store.put(DATA)
    os.utime(store.path(name), (0, 0))
    assert store.renew(name)
    assert not store.renew(sha(b"another"))
    store.expire(set)
    assert store.has(name)


def test_a_wrong_content_is_thrown_away(store):
    with pytest.raises(ProtocolError, match="hash"):
        store.receive(NAME, 10, 0, [(0, b"9876543210")])
    assert not store.has(NAME)
    assert store.have_bytes(NAME) == 0


@pytest.mark.parametrize("chunks", [[(1, b"x")], [(0, b"x" * 11)], [(0, b"x"), (2, b"x")]])
def test_chunks_out_of_order_or_beyond_the_end_are_refused(store, chunks):
    with pytest.raises(ProtocolError, match="expected byte"):
        store.receive(NAME, 10, 0, chunks)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_only_hashes_are_names(store, name):
    with pytest.raises(UsageError, match="64 hexadecimal"):
        store.has(name)
    with pytest.raises(UsageError, match="64 hexadecimal"):
        store.receive(name, 1, 0, [(0, b"x")])


def test_too_large_is_refused_before_anything_is_written(tmp_path):
    store = ArtifactStore(tmp_path / "a", max_artifact_bytes=9)
    with pytest.raises(PolicyRefused, match="at most 9"):
        store.receive(NAME, 10, 0, [(0, DATA)])
    assert list(store.root.iterdir()) == []


def test_the_quota_is_kept_and_survives_a_restart(tmp_path):
    ArtifactStore(tmp_path / "a", quota_bytes=15).put(DATA)
    store = ArtifactStore(tmp_path / "a", quota_bytes=15)
    with pytest.raises(PolicyRefused, match="10 of 15"):
        store.put(b"abcdefghij")
    store.delete(NAME)
    store.put(b"abcdefghij")


def test_room_is_made_by_old_artifacts_that_no_job_needs(tmp_path):
    kept = sha(b"kept")
    clock = [0.0]
    store = ArtifactStore(tmp_path / "a", quota_bytes=15, in_use=lambda: {kept}, now=lambda: clock[0])
    store.put(b"kept")
    store.put(b"unused")
    clock[0] = store.path(kept).stat().st_mtime + EVICT_AFTER_S + 1
    store.put(DATA)
    assert store.has(kept)
    assert not store.has(sha(b"unused"))


def test_the_room_is_that_of_the_disk_or_less_by_what_jobs_need_of_the_quota(tmp_path, monkeypatch):
    needed: set[str] = set()
    store = ArtifactStore(tmp_path / "a", quota_bytes=1000, in_use=lambda: needed)
    name = store.put(bytes(300))
    assert store.room() == 1000
    needed.update({name, sha(b"uploaded elsewhere")})
    assert store.room() == 700
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10 if folder == store.root else 0))
    assert store.room() == 10


def test_an_empty_artifact_is_one_too(store):
    assert store.read(store.put(b"")) == b""


def test_chunks_begin_where_asked(store):
    store.put(DATA)
    assert list(store.chunks(NAME, 4)) == [(4, 10, DATA[4:])]
    assert list(store.chunks(NAME, 10)) == [(10, 10, b"")]
    with pytest.raises(UsageError, match="offset"):
        list(store.chunks(NAME, 11))


def test_a_missing_artifact_is_named(store):
    with pytest.raises(UsageError, match=NAME):
        store.path(NAME)
