from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import frames
from nfdt.core.wire.frames import Assembly, decode_frame, decode_message, encode_frame, split
from nfdt.core.wire.shards_pb2 import FRAME_UNSPECIFIED, PUSH, Frame, StateChunk

headers = st.builds(
    Frame,
    kind=st.sampled_from([FRAME_UNSPECIFIED, PUSH]),
    sequence=st.integers(0, 2**64 - 1),
    worker=st.text(max_size=20),
    samples=st.integers(0, 2**32 - 1),
    want_weights=st.booleans(),
    error=st.text(max_size=200),
)


@given(headers, st.binary(max_size=400))
def test_what_is_encoded_is_decoded(header, payload):
    found, view = decode_frame(encode_frame(header, payload))
    assert (found, bytes(view)) == (header, payload)


@given(headers, st.binary(max_size=400))
def test_a_frame_is_the_protobuf_message(header, payload):
    data = encode_frame(header, payload)
    header.payload = payload
    assert Frame.FromString(data) == header
    assert bytes(decode_frame(header.SerializeToString())[1]) == payload


def test_the_payload_is_a_view_of_the_frame():
    data = encode_frame(Frame(kind=PUSH), np.arange(8, dtype=np.float32))
    _, view = decode_frame(data)
    assert view.obj is data
    assert np.frombuffer(view, np.float32).tolist() == list(range(8))


def test_other_messages_with_field_15_work_too():
    header, view = decode_message(encode_frame(StateChunk(offset=5, total_bytes=9), b"abcd"), StateChunk)
    assert (header.offset, header.total_bytes, bytes(view)) == (5, 9, b"abcd")


@given(headers, st.binary(min_size=1, max_size=300), st.data())
def test_a_truncated_frame_is_refused(header, payload, data):
    whole = encode_frame(header, payload)
    cut = data.draw(st.integers(len(header.SerializeToString()) + 1, len(whole) - 1))
    with pytest.raises(ProtocolError, match=r"truncated|bytes of payload"):
        decode_frame(whole[:cut])


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_protocol_error(data):
    try:
        header, view = decode_frame(data)
    except ProtocolError:
        return
    assert Frame.FromString(data) == Frame.FromString(encode_frame(header, view))


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
        b"\x1a\x02\xff\xfe",
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
        "not utf-8",
        "cut fixed",
    ],
)
def test_a_malformed_frame_is_refused(data):
    with pytest.raises(ProtocolError, match="Frame"):
        decode_frame(data)


def test_an_oversized_frame_is_refused_on_both_sides():
    with pytest.raises(ProtocolError, match="at most"):
        encode_frame(Frame(), bytes(frames.CHUNK_BYTES + 1))
    with pytest.raises(ProtocolError, match="too large"):
        decode_frame(Frame(payload=bytes(frames.CHUNK_BYTES + 1)).SerializeToString())
    with pytest.raises(ProtocolError, match="at most"):
        decode_frame(bytes(frames.CHUNK_BYTES + frames.MAX_HEADER_BYTES + 1))
    with pytest.raises(ProtocolError, match="too large"):
        decode_frame(Frame(error="x" * (frames.MAX_HEADER_BYTES + 1)).SerializeToString())


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
