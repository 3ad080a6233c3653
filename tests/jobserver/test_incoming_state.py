"""State of shards on its way to a file."""

import os
import tracemalloc

import numpy as np
import pytest

from nfdt.core.arrays.safetensors_io import dump_arrays, dump_parts, load_arrays
from nfdt.core.errors import NotStored, PolicyRefused, ProtocolError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.wire.chunks import cut
from nfdt.core.wire.shards_pb2 import StateChunk
from nfdt.jobserver.incoming_state import IncomingState

ARRAYS = {
    "weights": np.arange(9, dtype=np.float32),
    "optimizer/0": np.array(7),
    "optimizer/1": np.ones((2, 3), np.float32),
    "empty": np.zeros((0, 2), np.float32),
}


def chunks_of(data, size=5):
    for chunk, payload in cut(len(data), [data], size):
        chunk.data = bytes(payload)
        yield chunk


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_each_array_is_written_to_its_place(tmp_path, size):
    incoming = IncomingState(chunks_of(dump_arrays(ARRAYS), size), 10_000)
    assert {name: (entry.dtype, entry.shape) for name, entry in incoming.arrays.items()} == {
        name: (array.dtype, array.shape) for name, array in ARRAYS.items()
    }
    with open(tmp_path / "file", "w+b") as file:
        incoming.write({"weights": (file.fileno(), 8), "optimizer/1": (file.fileno(), 100)})
        data = file.read()
    np.testing.assert_array_equal(np.frombuffer(data, np.float32, 9, 8), ARRAYS["weights"])
    np.testing.assert_array_equal(np.frombuffer(data, np.float32, 6, 100), np.ones(6))


def test_a_state_that_breaks_off_or_goes_on_is_refused():
    data = dump_arrays(ARRAYS)
    for broken in (data[:3], data[:40], data[:-1], data + b"more"):
        with pytest.raises(ProtocolError):
            IncomingState(chunks_of(broken), 10_000).write({})
    with pytest.raises(ProtocolError, match="at most 10"):
        IncomingState(chunks_of(data), 10)


def test_memory_does_not_grow_with_the_state(tmp_path):
    vector = np.zeros(2**24, np.float32)

    def chunks():
        for chunk, payload in cut(sum(map(len, parts)), parts):
            yield StateChunk(offset=chunk.offset, total_bytes=chunk.total_bytes, data=bytes(payload))

    parts, store = dump_parts({"weights": vector}), ArtifactStore(tmp_path)
    tracemalloc.start()
    try:
        incoming = IncomingState(chunks(), 2**30)
        with store.create(vector.nbytes) as (new,):
            incoming.write({"weights": (new.file, 0)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < vector.nbytes / 4
    assert store.path(new.name).stat().st_size == vector.nbytes


def test_a_created_artifact_has_the_name_of_its_content(tmp_path):
    store, data = ArtifactStore(tmp_path, quota_bytes=2000), dump_arrays(ARRAYS)
    for _ in range(5):  # the same content takes room once
        with store.create(len(data)) as (new,):
            os.pwrite(new.file, data[8:], 8)
            os.pwrite(new.file, data[:8], 0)
    assert new.name == store.put(data)
    np.testing.assert_array_equal(load_arrays(store.path(new.name))["weights"], ARRAYS["weights"])
    with pytest.raises(PolicyRefused), store.create(2000):
        pytest.fail("there is no room")


def test_a_creation_that_fails_leaves_nothing(tmp_path):
    store = ArtifactStore(tmp_path, quota_bytes=100)
    with pytest.raises(NotStored, match="No space"), store.create(60):
        raise OSError(28, "No space left on device")
    with pytest.raises(ProtocolError), store.create(60):
        raise ProtocolError("The shard is gone.")
    assert not list(tmp_path.iterdir())
    store.put(bytes(100))
