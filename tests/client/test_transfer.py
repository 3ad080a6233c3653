"""Uploads, downloads and the event stream over connections that break."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from nfdt_client.connection import JobsClient
from nfdt_client.upload import Blob, array_blob, download, upload

from nfdt.core.errors import AuthenticationFailed, CaptureError, ProtocolError, ServerUnreachable, UsageError
from nfdt.model.training.data import decode_npy
from tests.support.fake_server import TOKEN, Job


def joined(blob: Blob, offset: int = 0, chunk_bytes: int = 7) -> bytes:
    pieces = list(blob.chunks(offset, chunk_bytes))
    assert [at for at, _ in pieces] == sorted(at for at, _ in pieces)
    assert all(len(data) <= chunk_bytes for _, data in pieces)
    return b"".join(data for _, data in pieces)


def test_chunks_of_a_blob_are_its_bytes_from_any_offset():
    content = [b"hello ", bytearray(b"big "), memoryview(b"world")]
    whole = b"".join(bytes(part) for part in content)
    blob = Blob(*content)
    assert (blob.size, blob.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    for offset in range(len(whole) + 1):
        assert joined(blob, offset) == whole[offset:]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12).reshape(3, 4).T,
        np.arange(24, dtype=np.int8).reshape(4, 6)[::2, ::3],
        np.array([True, False]),
        np.array(["a", "longer"], dtype=object),
        np.zeros((0, 3)),
        np.float32(3.0),
    ],
)
def test_an_array_travels_as_npy(array):
    got = decode_npy(joined(array_blob(array), chunk_bytes=1000))
    assert got.shape == np.shape(array)
    assert np.array_equal(got, array)


def test_python_objects_are_no_data():
    with pytest.raises(CaptureError, match="object"):
        array_blob(np.array([{}, None]))


def test_an_array_that_is_written_to_while_it_is_sent_is_named(connection):
    array = np.zeros(1000)
    blob = array_blob(array)
    array[-1] = 1.0
    with pytest.raises(UsageError, match="expected arrays that stay as they are while they are sent"):
        upload(connection, {blob.sha256: blob})


def test_only_what_is_missing_is_sent_and_arrives_whole(connection, fake):
    blobs = {blob.sha256: blob for blob in (Blob(b"a" * 5_000_000), Blob(b"b"), Blob(b""))}
    assert upload(connection, blobs) == 5_000_001
    assert upload(connection, blobs) == 0
    assert {name: len(data) for name, data in fake.jobs.artifacts.items()} == {n: b.size for n, b in blobs.items()}


def test_a_broken_upload_goes_on_where_it_broke(connection, fake):
    blob = Blob(np.random.default_rng(0).bytes(9_000_000))
    fake.jobs.break_upload_after = [3_000_000, 7_000_000]
    upload(connection, {blob.sha256: blob})
    assert fake.jobs.artifacts[blob.sha256] == joined(blob, chunk_bytes=10_000_000)
    assert fake.jobs.received_bytes == blob.size


def test_a_download_with_the_wrong_hash_is_refused(connection, fake):
    name = fake.jobs.keep(b"x" * 2500)
    assert download(connection, name) == b"x" * 2500
    fake.jobs.artifacts[name] = b"y" * 2500
    with pytest.raises(ProtocolError, match=name):
        download(connection, name)


def started(fake, count: int) -> Job:
    job = fake.jobs.jobs["job-0"] = Job(spec=None, state=b"")
    for index in range(count):
        fake.jobs.emit(job, "log", {"text": str(index)})
    return job


def test_a_broken_watch_goes_on_at_its_cursor(connection, fake):
    job = started(fake, 10)
    fake.jobs.emit(job, "state", {"state": "succeeded"})
    fake.jobs.break_watch_after = [3, 0, 5]
    assert [event.cursor for event in connection.watch("job-0")] == list(range(1, 12))
    assert fake.jobs.watches == 4


def test_recorded_events_end_while_the_job_goes_on(connection, fake):
    started(fake, 3)
    assert [event.data["text"] for event in connection.recorded("job-0")] == ["0", "1", "2"]


def test_a_watch_gives_up_after_a_deadline(fake):
    started(fake, 2)
    link = JobsClient(fake.address, TOKEN, reconnect_s=0.3)
    events = link.watch("job-0")
    assert next(events).cursor == 1
    fake.grpc_server.stop(None).wait()
    with pytest.raises(ServerUnreachable, match="Gave up"):
        list(events)


def test_a_dead_embedded_server_is_not_waited_for(fake):
    def check():
        raise ServerUnreachable("it is dead")

    started(fake, 1)
    link = JobsClient(fake.address, TOKEN, check=check, reconnect_s=60)
    events = link.watch("job-0")
    next(events)
    fake.grpc_server.stop(None).wait()
    with pytest.raises(ServerUnreachable, match="it is dead"):
        list(events)


def test_a_wrong_token_is_refused(fake):
    link = JobsClient(fake.address, "wrong")
    with pytest.raises(AuthenticationFailed):
        link.describe()
    link.close()
