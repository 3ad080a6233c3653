from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.errors import ProtocolError
from nfdt.core.wire.chunks import CHUNK_BYTES, cut, encode_chunk, payloads, split, spooled
from nfdt.core.wire.shards_pb2 import StateChunk

headers = st.builds(StateChunk, offset=st.integers(0, 2**64 - 1), total_bytes=st.integers(0, 2**64 - 1))


@given(headers, st.binary(max_size=400))
def test_a_chunk_is_the_protobuf_message(header, payload):
    data = encode_chunk(header, payload)
    header.data = payload
    assert StateChunk.FromString(data) == header


def test_the_payload_may_be_an_array():
    array = np.arange(2**10, dtype=np.float32)
    assert StateChunk.FromString(encode_chunk(StateChunk(offset=1), array)).data == array.tobytes()


def test_an_oversized_chunk_is_not_sent():
    with pytest.raises(ProtocolError, match="at most"):
        encode_chunk(StateChunk(), bytes(CHUNK_BYTES + 1))


@given(st.integers(0, 1000), st.integers(1, 300))
def test_ranges_cover_every_byte_once(total, chunk):
    ranges = list(split(total, chunk))
    assert [i for r in ranges for i in range(r.start, r.stop)] == list(range(total))
    assert len(ranges) == max(1, -(-total // chunk))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4), st.integers(1, 100))
def test_what_is_cut_is_put_together(parts, size):
    data = b"".join(parts)
    parts = [part for part in parts if part] or [b""]
    chunks = [StateChunk.FromString(encode_chunk(*chunk)) for chunk in cut(len(data), parts, size)]
    assert b"".join(payloads(chunks, len(data), "Write")) == data
    assert bytes(spooled(chunks, len(data), "Write")) == data


@pytest.mark.parametrize(
    "chunks",
    [
        [StateChunk(offset=4, total_bytes=8, data=b"1234")],
        [StateChunk(total_bytes=8, data=b"123456789")],
        [StateChunk(total_bytes=8)],
        [StateChunk(total_bytes=8, data=b"1234")],
        [StateChunk(total_bytes=8, data=b"1234"), StateChunk(total_bytes=8, data=b"1234")],
        [StateChunk(total_bytes=8, data=b"1234"), StateChunk(offset=4, total_bytes=8), StateChunk(offset=4)],
    ],
    ids=["not the first", "too long", "empty", "incomplete", "twice", "empty in the middle"],
)
def test_chunks_out_of_place_are_refused(chunks):
    with pytest.raises(ProtocolError, match="Write: expected"):
        list(payloads(chunks, 8, "Write"))


def test_a_transfer_above_the_limit_is_refused_at_its_first_chunk():
    chunks = iter([StateChunk(total_bytes=9, data=b"1"), pytest.fail])
    with pytest.raises(ProtocolError, match="at most 8"):
        list(payloads(chunks, 8, "Write"))
