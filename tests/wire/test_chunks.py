from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import chunks
from nfdt.core.wire.chunks import Assembly, decode_chunk, encode_chunk, split
from nfdt.core.wire.shards_pb2 import ForgetWorker, StateChunk

headers = st.builds(StateChunk, offset=st.integers(0, 2**64 - 1), total_bytes=st.integers(0, 2**64 - 1))


def decode(data):
    return decode_chunk(data, StateChunk)


@given(headers, st.binary(max_size=400))
def test_what_is_encoded_is_decoded(header, payload):
    found, view = decode(encode_chunk(header, payload))
    assert (found, bytes(view)) == (header, payload)


@given(headers, st.binary(max_size=400))
def test_a_chunk_is_the_protobuf_message(header, payload):
    data = encode_chunk(header, payload)
    header.data = payload
    assert StateChunk.FromString(data) == header
    assert bytes(decode(header.SerializeToString())[1]) == payload


def test_the_payload_is_a_view_of_the_chunk():
    data = encode_chunk(StateChunk(offset=1), np.arange(8, dtype=np.float32))
    _, view = decode(data)
    assert view.obj is data
    assert np.frombuffer(view, np.float32).tolist() == list(range(8))


@given(headers, st.binary(min_size=1, max_size=300), st.data())
def test_a_truncated_chunk_is_refused(header, payload, data):
    whole = encode_chunk(header, payload)
    cut = data.draw(st.integers(len(header.SerializeToString()) + 1, len(whole) - 1))
    with pytest.raises(ProtocolError, match=r"truncated|bytes of payload"):
        decode(whole[:cut])


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_a_protocol_error(data):
    try:
        header, view = decode(data)
    except ProtocolError:
        return
    assert StateChunk.FromString(data) == StateChunk.FromString(encode_chunk(header, view))


@pytest.mark.parametrize(
    "data",
    [
        b"\x7a",
        b"\x7a\x05abc",
        b"\x7a\x01ab",
        b"\x7a" + b"\xff" * 10 + b"\x01",
        b"\x08",
        b"\x0b\x00",
        b"\x1a\x7fshort",
        b"\x71\x00",
    ],
    ids=[
        "tag only",
        "too few",
        "too many",
        "endless length",
        "no value",
        "group",
        "cut field",
        "cut fixed",
    ],
)
def test_a_malformed_chunk_is_refused(data):
    with pytest.raises(ProtocolError, match="Chunk"):
        decode(data)


def test_an_oversized_chunk_is_refused_on_both_sides():
    with pytest.raises(ProtocolError, match="at most"):
        encode_chunk(StateChunk(), bytes(chunks.CHUNK_BYTES + 1))
    with pytest.raises(ProtocolError, match="too large"):
        decode(StateChunk(data=bytes(chunks.CHUNK_BYTES + 1)).SerializeToString())
    with pytest.raises(ProtocolError, match="at most"):
        decode(bytes(chunks.CHUNK_BYTES + chunks.MAX_HEADER_BYTES + 1))
    with pytest.raises(ProtocolError, match="too large"):
        decode_chunk(ForgetWorker(worker="x" * (chunks.MAX_HEADER_BYTES + 1)).SerializeToString(), ForgetWorker)


@given(st.integers(0, 1000), st.integers(1, 300))
def test_ranges_cover_every_byte_once(total, chunk):
    ranges = list(split(total, chunk))
    assert [i for r in ranges for i in range(r.start, r.stop)] == list(range(total))
    assert len(ranges) == max(1, -(-total // chunk))


@given(st.binary(max_size=500), st.integers(1, 100))
def test_chunks_are_put_together(data, chunk):
    buffer = bytearray(len(data))
    assembly = Assembly(buffer)
    for part in split(len(data), chunk):
        assembly.add(part.start, memoryview(data)[part])
    assert assembly.complete
    assert bytes(buffer) == data


@pytest.mark.parametrize(("offset", "size"), [(4, 4), (0, 9), (0, 0)])
def test_a_chunk_out_of_place_is_refused(offset, size):
    with pytest.raises(ProtocolError, match="Chunk"):
        Assembly(bytearray(8)).add(offset, memoryview(bytes(size)))
