import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ProtocolError, ServerUnreachable, ShapeMismatch
from nfdt.core.wire import shards_pb2, workers_pb2
from nfdt.jobserver.shard_clients import GrpcShardClients, connect_shards
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from tests.support.fakes import LAYOUT, WEIGHTS, FakeShard
from tests.support.saved_state import saved
from tests.support.shard_cluster import Reference, gradients, rule_spec

VARIABLES = [{"variable": -1}, {"variable": 0}, {"variable": 1}]
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
    shards[0].Read = lambda request, context: iter([shards_pb2.StateChunk(total_bytes=2**40, data=b"x")])
    with pytest.raises(ProtocolError, match="at most"):
        _replaced(shards[0], control)


def test_chunks_that_leave_a_gap_are_refused(control, shards):
    data = dump_arrays({"weights": WEIGHTS[:4]})
    gap = [shards_pb2.StateChunk(offset=4, total_bytes=len(data), data=data[4:])]
    shards[0].Read = lambda request, context: iter(gap)
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


def test_a_variable_that_is_cut_comes_back_whole_with_its_optimizer_slots():
    layout = ParameterLayout.of([("table", (300, 64)), ("bias", (10,))])
    reference = Reference(keras.optimizers.SGD(0.1, momentum=0.9), layout=layout)
    reference.apply(gradients(1, layout=layout)[0])
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
