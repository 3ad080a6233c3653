"""Compression of transfers over slow links."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.errors import ProtocolError
from nfdt.core.wire.deflated import SLOW_BYTES_PER_S, Deflater, inflated
from tests.support.clocks import ManualClock

SIZE = 100_000
IMAGES = bytes(SIZE)
NOISE = np.random.default_rng(0).bytes(SIZE)
QUICK, SLOW = 4 * SLOW_BYTES_PER_S, SLOW_BYTES_PER_S / 4


def sent(pieces, bytes_per_s):
    """Return the chunks as a link of this bandwidth carries them."""
    clock, found = ManualClock(), []
    deflater = Deflater(clock.now)
    for piece in pieces:
        found.append(deflater.pack(piece))
        clock.advance(len(found[-1][0]) / bytes_per_s)
    return found


def test_a_quick_link_carries_everything_as_it_is():
    assert sent([IMAGES] * 3, QUICK) == [(IMAGES, False)] * 3


def test_chunks_behind_a_slow_one_are_compressed():
    first, *others = sent([IMAGES] * 3, SLOW)
    assert first == (IMAGES, False)
    assert all(compressed and len(data) < SIZE / 100 for data, compressed in others)


def test_what_cannot_be_compressed_is_tried_once():
    assert sent([NOISE, NOISE, IMAGES], SLOW) == [(NOISE, False), (NOISE, False), (IMAGES, False)]


@given(st.lists(st.binary(max_size=300) | st.integers(0, 3000).map(bytes), max_size=6))
def test_every_byte_arrives(pieces):
    assert [inflated(data, compressed, 3000) for data, compressed in sent(pieces, SLOW)] == pieces


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"garbage", "expected compressed data"),
        (zlib.compress(bytes(1001)), "at most 1000 bytes"),
        (zlib.compress(bytes(2**30), 9), "at most 1000 bytes"),
        (zlib.compress(bytes(100))[:-1], "or a part"),
    ],
    ids=["garbage", "larger", "bomb", "cut"],
)
def test_what_is_no_compressed_chunk_is_refused(data, message):
    with pytest.raises(ProtocolError, match=message):
        inflated(data, True, 1000)
