"""Batches of a client in pieces: whole again on the other side, refused before anything is joined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.errors import ProtocolError
from nfdt.core.jobs import feed
from nfdt.core.jobs.feed import BatchAssembly, StreamedBatch, pieces
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.chunks import CHUNK_BYTES


@given(st.lists(st.integers(1, 3 * CHUNK_BYTES), min_size=1, max_size=3))
def test_batches_come_out_as_they_went_in(sizes):
    batches = [StreamedBatch(1, step, 4, bytes([step]) * size) for step, size in enumerate(sizes)]
    waited = []
    assembly = BatchAssembly(lambda epoch, size: waited.append((epoch, size)))
    sent = [piece for batch in batches for piece in pieces(batch)]
    assert all(piece.ByteSize() <= CHUNK_BYTES + 64 for piece in sent)
    assert [batch for piece in sent if (batch := assembly.add(piece)) is not None] == batches
    assert waited == [(1, size) for size in sizes]  # once per batch, before its first piece is kept


@pytest.mark.parametrize("size", [0, feed.MAX_BATCH_BYTES + 1])
def test_a_batch_of_an_impossible_size_is_refused_before_there_is_room_for_it(size):
    with pytest.raises(ProtocolError, match="at most"):
        BatchAssembly(pytest.fail).add(pb.FedBatch(total_bytes=size, data=b"x"))


@pytest.mark.parametrize(("offset", "data"), [(1, b"abc"), (2, b""), (2, b"abc"), (3, b"b")])
def test_a_piece_that_is_not_the_next_one_is_refused(offset, data):
    assembly = BatchAssembly(lambda epoch, size: None)
    assert assembly.add(pb.FedBatch(total_bytes=4, data=b"ab")) is None
    with pytest.raises(ProtocolError, match="expected bytes from 2 up to 4"):
        assembly.add(pb.FedBatch(total_bytes=4, offset=offset, data=data))
