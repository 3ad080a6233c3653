"""Named arrays as safetensors: mapped, in pieces, and malformed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.numpy import load

from nfdt.core.arrays.safetensors_io import (
    ArrayEntry,
    Pieces,
    dump_arrays,
    dump_parts,
    give_back,
    load_arrays,
    stream_parts,
)
from nfdt.core.errors import ProtocolError

DTYPES = st.sampled_from(["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8"])
ARRAYS = st_numpy.arrays(DTYPES, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=5))
def test_arrays_are_read_by_this_library_and_by_that_of_the_format(arrays):
    data = b"".join(dump_parts(arrays))
    for found in (load_arrays(data), load(data), load_arrays(dump_arrays(arrays))):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found[name], array)


def test_pieces_are_one_array_and_may_be_made_while_they_are_read():
    vector = np.arange(10, dtype=np.float32)
    pieces = Pieces(ArrayEntry(np.dtype("<f4"), (2, 5)), (vector[i : i + 3] for i in (0, 3, 6, 9)))
    size, parts = stream_parts({"a": pieces, "b": np.array(True)})
    data = b"".join(parts)
    assert len(data) == size
    np.testing.assert_array_equal(load_arrays(data)["a"], vector.reshape(2, 5))


def test_memory_of_a_mapped_file_is_given_back_and_read_again(tmp_path):
    file, large = tmp_path / "file", np.arange(2**20, dtype=np.float32)
    file.write_bytes(dump_arrays({"large": large, "small": np.ones(3), "none": np.zeros(0)}))
    found = load_arrays(file)
    assert found["large"].sum() > 0
    for array in (*found.values(), large):
        give_back(array)
    np.testing.assert_array_equal(found["large"], large)
    np.testing.assert_array_equal(found["small"], np.ones(3))


def header(**changes):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return {"a": entry}


@pytest.mark.parametrize(
    "entries",
    [
        header(dtype="F128"),
        header(shape=[3]),
        header(shape=[-2]),
        header(shape="x"),
        header(data_offsets=[4, 12]),
        header(data_offsets=[0]),
        {"a": 1},
        [],
        "text",
    ],
    ids=str,
)
def test_malformed_headers_are_refused(entries):
    text = json.dumps(entries).encode()
    with pytest.raises(ProtocolError):
        load_arrays(len(text).to_bytes(8, "little") + text + bytes(8))


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(7) + b"\xff", (10).to_bytes(8, "little") + b"{}"], ids=repr)
def test_what_is_no_safetensors_is_refused(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    for source in (data, tmp_path / "file"):
        with pytest.raises(ProtocolError):
            load_arrays(source)


def test_a_file_that_is_too_short_or_too_long_is_refused():
    data = dump_arrays({"a": np.ones(4)})
    for broken in (data[:-1], data + b"x"):
        with pytest.raises(ProtocolError, match="bytes"):
            load_arrays(broken)
