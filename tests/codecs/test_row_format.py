"""Row format of tables: it has a name among the codecs but is none, and neither end decodes it as a vector."""

import numpy as np
import pytest

from nfdt.codecs import DECODERS, find_decoder, make_encoders
from nfdt.codecs.sparse import ROWS
from nfdt.core.errors import ProtocolError, ShapeMismatch


def test_every_codec_can_encode_and_so_can_rows():
    encoders = make_encoders(0.25)
    assert {name: codec.name for name, codec in encoders.items()} == {name: name for name in [*DECODERS, "rows"]}
    assert encoders["top-k"].encoded_bytes(100) == 8 * 25


def test_the_name_of_rows_is_known_and_no_name_is_the_identity():
    assert find_decoder("rows") is ROWS
    assert find_decoder("") is find_decoder("identity")


def test_rows_are_at_most_a_place_and_a_number_for_every_element():
    ROWS.check(8 * 10 + 4, 10)
    with pytest.raises(ShapeMismatch, match="at most 84 bytes. Received: 85"):
        ROWS.check(8 * 10 + 5, 10)


def test_a_vector_is_neither_written_as_rows_nor_read_from_them():
    with pytest.raises(ProtocolError, match="a job with tables. Received: a request for rows"):
        ROWS.encode(np.zeros(3, np.float32))
    with pytest.raises(ProtocolError, match="a job with tables. Received: rows for one without"):
        ROWS.decode(np.zeros(12, np.uint8), np.zeros(3, np.float32))
