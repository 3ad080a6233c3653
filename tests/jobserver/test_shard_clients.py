import contextlib

import grpc
import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import dump_arrays, header_bytes, load_arrays
from nfdt.core.errors import ProtocolError, ServerUnreachable, ShapeMismatch
from nfdt.core.host.machine import boot_id
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.wire import chunks as chunks_module
from nfdt.core.wire import passed_files, shards_pb2, workers_pb2
from nfdt.jobserver import incoming_state, shard_clients
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.shard_clients import GrpcShardClients, connect_shards
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State, load_state
from nfdt.shard.servicer import start_shard
from tests.support.fakes import LAYOUT, WEIGHTS, FakeShard
from tests.support.saved_state import saved
from tests.support.shard_cluster import Reference, gradients, rule_spec

VARIABLES = [{"variable": -1}, {"variable": 0}, {"variable": 1}]
LARGE = ParameterLayout.of([("table", (300, 64)), ("bias", (10,))])
MANIFEST = Manifest({"layout": LAYOUT, "optimizer_variables": VARIABLES})


class RecordingShard(FakeShard):
    def Write(self, request_iterator, context):
        self.written = load_arrays(b"".join(chunk.data for chunk in request_iterator))
        return shards_pb2.AdminReply()


@pytest.fixture
def shards():
    started = [RecordingShard(workers_pb2.ShardAssignment(index=i, shards=2, job_token="job-token")) for i in range(2)]
    yield started
    for shard in started:
        shard.stop()


@pytest.fixture
def control(shards):
    control = connect_shards([shard.address for shard in shards], MANIFEST, "job-token")
    yield control
    control.close()


def test_each_shard_is_sent_what_it_owns(control, shards):
    control.write(State(WEIGHTS, {0: np.array(5), 1: np.ones((2, 2)), 2: np.ones(2)}))
    assert [sorted(shard.written) for shard in shards] == [
        ["optimizer/0", "optimizer/1", "weights"],
        ["optimizer/0", "optimizer/2", "weights"],
    ]
    np.testing.assert_array_equal(np.concatenate([shard.written["weights"] for shard in shards]), WEIGHTS)


def test_weights_of_another_size_are_refused_before_they_are_sent(control):
    with pytest.raises(ShapeMismatch, match="expected 6 weights"):
        control.write(State(np.zeros(5, np.float32)))


def test_a_shard_that_answers_with_another_size_is_named(control, shards):
    shards[1].weights = np.zeros(3, np.float32)
    with pytest.raises(ShapeMismatch, match="Shard 1: expected 2 weights"):
        saved(control)


def test_a_shard_that_declares_too_much_is_refused(control, shards):
    shards[0].Read = lambda requests, context: iter([shards_pb2.StateChunk(total_bytes=2**40, data=b"x")])
    with pytest.raises(ProtocolError, match="at most"):
        _replaced(shards[0], control)


def test_chunks_that_leave_a_gap_are_refused(control, shards):
    data = dump_arrays({"weights": WEIGHTS[:4]})
    gap = [shards_pb2.StateChunk(offset=4, total_bytes=len(data), data=data[4:])]
    shards[0].Read = lambda requests, context: iter(gap)
    with pytest.raises(ProtocolError, match="expected bytes from 0"):
        _replaced(shards[0], control)


def _replaced(shard, control):
    """Start a new server for the shard: handlers are bound when a servicer is registered."""
    from nfdt.core.wire import shards_pb2_grpc
    from nfdt.core.wire.channel import make_server

    server, address = make_server("127.0.0.1:0", authenticate=lambda method, token: True)
    shards_pb2_grpc.add_ShardServicer_to_server(shard, server)
    server.start()
    alone = GrpcShardClients([address], ParameterLayout.from_json([["kernel", [2, 2]]]), "t")
    try:
        saved(alone)
    finally:
        alone.close()
        server.stop(None)


def test_a_shard_that_is_gone_is_named(control, shards):
    shards[1].stop()
    for call in (control.flush, lambda: control.forget("worker-0", [1])):
        with pytest.raises(ServerUnreachable, match="shard 1"):
            call()


@pytest.fixture
def real_shards():
    reference = Reference(keras.optimizers.SGD(0.1, momentum=0.9), layout=LARGE)
    state = State(reference.weights, reference.state)
    arguments = (reference.manifest(), state, rule_spec("ddc"))
    running = [start_shard(*arguments, index, 3, workers=1, token="t", leased=False) for index in range(3)]
    control = connect_shards([shard.address for shard in running], reference.manifest(), "t")
    yield control
    control.close()
    for shard in running:
        shard.stop()


@pytest.mark.parametrize("elsewhere", ["another machine", "no files", "another user"])
def test_a_shard_on_this_machine_writes_to_the_files_what_another_one_sends(
    real_shards, tmp_path, monkeypatch, elsewhere
):
    def no_files(files):
        raise OSError("no socket")

    own, other = ArtifactStore(tmp_path / "own"), ArtifactStore(tmp_path / "other")
    rest = Rest([np.arange(3)], b"metrics")

    def store(artifacts):
        snapshot = real_shards.snapshot(lambda: None, artifacts, rest)
        return snapshot.state, snapshot.records, real_shards.save(artifacts, rest, weights_only=True)

    near = store(own)
    with monkeypatch.context() as changed:
        if elsewhere == "another machine":
            changed.setattr(shard_clients, "boot_id", lambda: "another")
        elif elsewhere == "no files":
            changed.setattr(shard_clients, "PassedFiles", no_files)
        else:
            changed.setattr(passed_files, "_user_of", lambda peer: -1)
        assert store(other) == near
    assert {file.name for file in own.root.iterdir()} == {file.name for file in other.root.iterdir()}
    assert load_state(own.path(near[0])).metrics == b"metrics"


def test_a_shard_on_this_machine_sends_no_arrays(real_shards, tmp_path, monkeypatch):
    received = []

    def payloads(chunks, *arguments):
        for data in chunks_module.payloads(chunks, *arguments):
            received.append(len(data))
            yield data

    monkeypatch.setattr(incoming_state, "payloads", payloads)
    real_shards.save(ArtifactStore(tmp_path), Rest())
    assert sum(received) < 4 * LARGE.size / 10


@pytest.mark.parametrize(
    "place", [{"name": "weights", "offset": 10**6}, {"name": "others"}, {"name": "weights", "file": 1}]
)
def test_a_shard_writes_nothing_beyond_the_files(real_shards, tmp_path, place):
    with open(tmp_path / "file", "w+b") as file, contextlib.ExitStack() as stack:
        file.truncate(4 * LARGE.size)
        passed = passed_files.PassedFiles([file.fileno()])
        stack.callback(passed.withdraw)
        wanted = shards_pb2.ReadRequest(files=passed.name, boot_id=boot_id(), places=[shards_pb2.StatePlace(**place)])
        stub = real_shards._stubs[0]
        with pytest.raises(grpc.RpcError, match="expected places of this state's arrays"):
            list(stub.Read(iter([shards_pb2.ReadRequest(), wanted]), timeout=60))
        assert file.tell() == 0
        assert not any(file.read())


def test_an_early_end_without_files_is_an_error(control, shards):
    data = dump_arrays({"weights": WEIGHTS[:4]})
    begin = header_bytes(data)
    ends = [
        shards_pb2.StateChunk(total_bytes=len(data), data=data[:begin]),
        shards_pb2.StateChunk(offset=begin, total_bytes=begin),
    ]
    incoming = incoming_state.IncomingState(ends, 10_000)
    with pytest.raises(ProtocolError, match="expected more bytes"):
        incoming.write({"weights": (-1, 0)})


def test_a_variable_that_is_cut_comes_back_whole_with_its_optimizer_slots():
    reference = Reference(keras.optimizers.SGD(0.1, momentum=0.9), layout=LARGE)
    reference.apply(gradients(1, layout=LARGE)[0])
    manifest, state = reference.manifest(), State(reference.weights, reference.state)
    arguments = (manifest, State(reference.weights), rule_spec("ddc"))
    running = [start_shard(*arguments, index, 3, workers=1, token="t", leased=False) for index in range(3)]
    control = connect_shards([shard.address for shard in running], manifest, "t")
    try:
        control.write(state)
        assert [shard.store.size for shard in running] == [6400, 6400, 6410]
        found = saved(control)
    finally:
        control.close()
        for shard in running:
            shard.stop()
    np.testing.assert_array_equal(found.weights, state.weights)
    assert sorted(found.optimizer) == sorted(state.optimizer)
    for index, value in state.optimizer.items():
        np.testing.assert_allclose(found.optimizer[index], value, rtol=1e-6)
