"""Download of artifacts by workers on another machine: whole, by their hash, of their own job only."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from nfdt_client.connection import JobsClient
from nfdt_client.upload import Blob, upload

from nfdt.core.errors import AuthenticationFailed, PolicyRefused, ProtocolError, UsageError
from nfdt.core.jobs.artifacts import CHUNK_BYTES, MAX_RANGES
from nfdt.core.wire import deflated, workers_pb2_grpc
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import open_channel
from nfdt.core.work import artifacts
from nfdt.core.work.artifacts import ArtifactReader
from nfdt.core.work.remote_rows import RemoteRows
from nfdt.model.training.data import encode_npy
from tests.support.fakes import DEADLINE_S, TOKEN


@pytest.fixture
def job(start, cluster) -> Iterator[SimpleNamespace]:
    """Running job whose worker is in its first task, and the data that it was submitted with."""
    client = start(shards=1)
    reached, go_on = threading.Event(), threading.Event()

    def hold(slot, task):
        reached.set()
        assert go_on.wait(DEADLINE_S)

    cluster.add("worker", on_task=hold)
    data = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 5)
    spec = client.spec(epochs=1, workers=1)
    name = client.upload(data, piece=2**20)
    spec["train"]["arrays"] = [name]
    job_id = client.submit(spec)
    assert reached.wait(DEADLINE_S)
    yield SimpleNamespace(job_id=job_id, name=name, data=data, program=spec["program"], other=client.upload(b"other"))
    go_on.set()


@pytest.fixture
def reader(cluster, tmp_path):
    channels = []

    def make(job_id: str, token: str = TOKEN, address: str = "", **options) -> ArtifactReader:
        channels.append(open_channel(address or cluster.server.address, token))
        stub = workers_pb2_grpc.WorkersStub(channels[-1])
        return ArtifactReader(stub, job_id, str(tmp_path / "elsewhere"), tmp_path / "cache", "the server", **options)

    yield make
    for channel in channels:
        channel.close()


def kept(tmp_path) -> list[str]:
    return [file.name for file in (tmp_path / "cache").iterdir()]


def test_an_artifact_of_many_chunks_arrives_whole_and_is_kept(job, reader, tmp_path, cluster):
    there = reader(job.job_id)
    assert there.read(job.name) == job.data
    assert kept(tmp_path) == [job.name]
    (cluster.state_dir / "artifacts" / job.name).unlink()
    assert there.read(job.name) == job.data, "it is fetched once"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "ranges"])
def test_over_a_slow_link_what_has_zeros_is_compressed(start, cluster, reader, monkeypatch, whole):
    monkeypatch.setattr(deflated, "SLOW_BYTES_PER_S", float("inf"))
    packed = []

    def pack(self, data, real=deflated.Deflater.pack):
        packed.append(real(self, data))
        return packed[-1]

    monkeypatch.setattr(deflated.Deflater, "pack", pack)
    client = start(shards=1)
    data = bytes(3 * CHUNK_BYTES) + b"end"
    blob = Blob(data)
    connection = JobsClient(cluster.server.address, TOKEN)
    assert upload(connection, {blob.sha256: blob}) == len(data)
    connection.close()
    assert [compressed for _, compressed in packed] == [False, True, True, False]
    packed.clear()
    spec = client.spec(epochs=1, workers=1)
    spec["train"]["arrays"] = [blob.sha256]
    there = reader(client.submit(spec))
    if whole:
        assert there.read(blob.sha256) == data
    else:
        assert b"".join(there.fetch_ranges(blob.sha256, [(5, len(data) - 5)])) == data[5:]
    assert there.fetched_bytes == len(data) - (0 if whole else 5)
    assert [compressed for _, compressed in packed][:3] == [False, True, True]


def test_what_was_damaged_on_the_server_is_refused_and_not_kept(job, reader, tmp_path, cluster):
    file = cluster.state_dir / "artifacts" / job.name
    file.write_bytes(job.data[:-1] + b"x")
    with pytest.raises(ProtocolError, match=f"expected sha256 {job.name}"):
        reader(job.job_id).read(job.name)
    assert kept(tmp_path) == []


def test_an_artifact_of_no_job_or_of_another_one_is_refused(job, reader):
    for job_id, name in ((job.job_id, job.other), ("job-none", job.name)):
        with pytest.raises(PolicyRefused, match="no part of job"):
            reader(job_id).read(name)


def test_a_wrong_token_fetches_nothing(job, reader, tmp_path):
    with pytest.raises(AuthenticationFailed):
        reader(job.job_id, token="wrong").read(job.name)
    assert kept(tmp_path) == []


@pytest.fixture
def liar() -> Iterator:
    """Server that sends given chunks; returns its address and the list of chunks."""
    chunks: list[pb.FetchChunk] = []

    class Liar(workers_pb2_grpc.WorkersServicer):
        sent = 0

        def Fetch(self, request, context):
            for chunk in chunks:
                Liar.sent += len(chunk.data)
                yield chunk

    server = grpc.server(futures.ThreadPoolExecutor(2))
    workers_pb2_grpc.add_WorkersServicer_to_server(Liar(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield SimpleNamespace(address=address, chunks=chunks, servicer=Liar)
    server.stop(None).wait()


@pytest.mark.parametrize(
    "chunks",
    [
        [pb.FetchChunk(offset=0, total_bytes=4, data=b"good" * 1000)],
        [pb.FetchChunk(offset=0, total_bytes=4, data=b"good"), pb.FetchChunk(offset=4, total_bytes=4, data=b"more")],
        [pb.FetchChunk(offset=2, total_bytes=4, data=b"good")],
        [pb.FetchChunk(offset=0, total_bytes=4, data=b"evil")],
        [pb.FetchChunk(offset=0, total_bytes=4, data=b"goo")],
        [],
        [pb.FetchChunk(offset=0, total_bytes=4, data=zlib.compress(b"good" * 2), deflated=True)],
    ],
    ids=["oversized", "goes on", "another place", "damaged", "truncated", "nothing", "oversized when inflated"],
)
def test_what_is_not_the_artifact_is_refused_and_not_kept(liar, reader, tmp_path, chunks):
    liar.chunks.extend(chunks)
    with pytest.raises(ProtocolError, match="the server"):
        reader("job", address=liar.address).read(hashlib.sha256(b"good").hexdigest())
    assert kept(tmp_path) == []


def test_more_than_was_announced_is_refused_before_it_is_written(liar, reader):
    liar.chunks.extend(pb.FetchChunk(offset=4 * i, total_bytes=4, data=b"good") for i in range(1000))
    with pytest.raises(ProtocolError, match="expected byte 4 of 4"):
        reader("job", address=liar.address).read("f" * 64)


@pytest.mark.parametrize("name", ["../token", "/etc/passwd", ""])
def test_a_name_that_is_a_path_is_refused(liar, reader, name):
    with pytest.raises(ProtocolError, match="expected a sha256"):
        reader("job", address=liar.address).path(name)


def test_an_array_of_objects_is_not_unpickled(liar, reader, tmp_path):
    (tmp_path / "cache").mkdir()
    np.save(tmp_path / "cache" / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        reader("job", address=liar.address).open_array("a.npy")


def test_ranges_arrive_in_the_order_asked_for(job, reader):
    wanted = [(10, 5), (0, 3), (CHUNK_BYTES - 1, CHUNK_BYTES + 2), (len(job.data), 0)]
    got = b"".join(reader(job.job_id).fetch_ranges(job.name, wanted))
    assert got == b"".join(job.data[offset : offset + length] for offset, length in wanted)


@pytest.mark.parametrize("piece", [7, 2**24])
def test_ranges_of_a_file_are_read_in_calls_of_limited_size(job, reader, monkeypatch, tmp_path, piece):
    monkeypatch.setattr(artifacts, "PIECE_BYTES", piece)
    wanted = [(10, 5), (0, 3), (7, 0), (20, 40), (len(job.data) - 2, 2)]
    expected = b"".join(job.data[offset : offset + length] for offset, length in wanted)
    there = reader(job.job_id)
    assert there.read_ranges(job.name, wanted) == expected
    assert there.fetched_bytes == len(expected)
    assert not (tmp_path / "cache").exists()
    there.read(job.name)
    fetched = there.fetched_bytes
    assert there.read_ranges(job.name, wanted) == expected
    assert there.fetched_bytes == fetched


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 2**40)], "at most"),
        ([(0, 1)] * (MAX_RANGES + 1), "at most"),
        ([(2**40, 1)], "Received: 1 bytes from"),
        ([(1, 2 * CHUNK_BYTES + 5)], "Received: 4194309 bytes from 1"),
    ],
    ids=["too much", "too many", "behind the end", "over the end"],
)
def test_ranges_that_cannot_be_are_refused(job, reader, ranges, message):
    with pytest.raises(UsageError, match=message):
        list(reader(job.job_id).fetch_ranges(job.name, ranges))


def test_ranges_of_another_job_are_refused(job, reader):
    with pytest.raises(PolicyRefused, match="no part of job"):
        list(reader(job.job_id).fetch_ranges(job.other, [(0, 1)]))


def test_only_the_rows_of_a_large_array_are_fetched(cluster, start, reader):
    client = start(shards=1)
    reached, go_on = threading.Event(), threading.Event()

    def hold(slot, task):
        reached.set()
        assert go_on.wait(DEADLINE_S)

    cluster.add("worker", on_task=hold)
    array = np.random.default_rng(0).normal(size=(1000, 100))
    spec = client.spec(epochs=1, workers=1)
    name = client.upload(encode_npy(array))
    spec["train"]["arrays"] = [name]
    there = reader(client.submit(spec), whole_bytes=2**16)
    assert reached.wait(DEADLINE_S)
    rows = there.open_rows(name)
    assert isinstance(rows, RemoteRows)
    assert np.array_equal(rows.take(np.array([7, 3, 999, 3])), array[[7, 3, 999, 3]])
    assert there.fetched_bytes <= 4096 + 4 * 800
    go_on.set()


@pytest.mark.parametrize("there", ["as on the server", "of another size", "absent"])
def test_a_file_is_read_in_place_only_where_it_is(job, reader, tmp_path, there):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if there != "absent":
        (folder / job.name).write_bytes(job.data if there == "as on the server" else job.data[:-1])
    path = reader(job.job_id).path(job.name)
    assert path.parent == (folder if there == "as on the server" else tmp_path / "cache")
    assert path.read_bytes() == job.data
