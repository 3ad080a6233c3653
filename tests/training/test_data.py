import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nfdt.core.arrays.pytree import flatten_structure, rebuild
from nfdt.core.errors import CaptureError, ProtocolError, UsageError
from nfdt.model.training.data import (
    ArraySource,
    decode_batch,
    decode_npy,
    encode_batch,
    encode_npy,
)

DTYPES = st.sampled_from(["f4", "f8", "f2", "i8", "u1", "?", "U3", "S4", "c8"])
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
TREES = st.recursive(
    st.none() | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(a, b):
    assert type(a) is type(b) or isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif a is not None:
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


@given(TREES)
def test_a_pytree_comes_back_with_its_tuples_lists_and_dicts(tree):
    structure, arrays = flatten_structure(tree)
    same(tree, rebuild(json.loads(json.dumps(structure)), arrays))


@given(TREES)
def test_a_batch_comes_back_from_its_message(tree):
    same(tree, decode_batch(encode_batch(tree)))


@given(ARRAYS)
def test_an_array_comes_back_from_npy(array):
    same(np.array(array), decode_npy(encode_npy(array)))


def test_decoding_copies_nothing_and_the_views_are_read_only():
    batch = decode_batch(encode_batch((np.arange(6.0), np.zeros(3))))
    assert not batch[0].flags.owndata
    assert not batch[0].flags.writeable
    assert not decode_npy(encode_npy(np.arange(6.0))).flags.writeable


def test_an_array_used_twice_travels_once():
    x = np.zeros(3)
    structure, arrays = flatten_structure((x, [x, None]))
    assert structure == {"tuple": [0, [0, None]]}
    assert len(arrays) == 1


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (np.array(["a", "bcd"], object), "<U3"),
        (np.array([b"a", b"bc"], object), "|S2"),
        (pd.Series(["x", "yz"]), "<U2"),
        (pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}), "<f8"),
        (np.zeros(2, ">f4"), "<f4"),
        (3.5, "<f8"),
    ],
)
def test_what_looks_like_an_array_becomes_one(leaf, dtype):
    assert flatten_structure(leaf)[1][0].dtype.str == dtype


@pytest.mark.parametrize(
    "leaf", [np.array([1, "a"], object), np.array([{}, {}]), np.array(["2020"], "M8[D]"), object()]
)
def test_what_is_no_array_is_refused_with_the_remedy(leaf):
    with pytest.raises(CaptureError, match="Convert it first"):
        flatten_structure([leaf])


def test_dictionaries_need_names_as_keys():
    with pytest.raises(CaptureError, match="key: 3"):
        flatten_structure({3: np.zeros(1)})


@pytest.mark.parametrize("cut", [0, 3, 8, 20, -64, -1])
def test_a_truncated_batch_is_refused(cut):
    data = encode_batch((np.arange(100.0), np.zeros(3, "f4")))
    with pytest.raises(ProtocolError):
        decode_batch(data[:cut])
    with pytest.raises(ProtocolError):
        decode_batch(data + b"x")


@pytest.mark.parametrize(
    "header",
    [
        {"structure": 0, "arrays": [["|O", [1]]]},
        {"structure": 0, "arrays": [["<f4", [-1]]]},
        {"structure": 0, "arrays": [["<f4", [2**62, 2**62]]]},
        {"structure": 1, "arrays": []},
        {"structure": True, "arrays": []},
        {"structure": {"set": []}, "arrays": []},
        {"structure": {"sparse": [0, 0, [3]]}, "arrays": [["<f4", [0]]]},
        {"structure": {"sparse": [0, 0, [-3]]}, "arrays": [["<f4", [0]]]},
        {"structure": {"sparse": [0, 1, 2]}, "arrays": [["<f4", [0]]]},
        {"structure": {"ragged": [0]}, "arrays": [["<f4", [0]]]},
        {"structure": {"ragged": [0, None]}, "arrays": [["<f4", [0]]]},
        [],
    ],
)
def test_a_malicious_batch_is_refused(header):
    text = json.dumps(header).encode()
    with pytest.raises(ProtocolError):
        decode_batch(len(text).to_bytes(8, "little") + text)


def test_npy_with_objects_or_a_lying_header_is_refused():
    good = encode_npy(np.zeros(4))
    for bad in (b"", b"nothing", good[:-1], good + b"x", good.replace(b"(4,)", b"(9,)"), good.replace(b"<f8", b"|O8")):
        with pytest.raises(ProtocolError):
            decode_npy(bad)


def test_rows_are_gathered_in_order_and_consecutive_ones_are_views(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(encode_npy(np.arange(20).reshape(10, 2).T.copy().T))
    source = ArraySource({"tuple": [0, {"dict": {"y": 1}}]}, [np.load(path, mmap_mode="r"), np.arange(10)])
    assert source.samples == 10
    x, y = source.batch(np.asarray([7, 2, 2]))
    np.testing.assert_array_equal(x, [[14, 15], [4, 5], [4, 5]])
    np.testing.assert_array_equal(y["y"], [7, 2, 2])
    for rows in (np.arange(3, 6), slice(3, 6)):
        x, y = source.batch(rows)
        np.testing.assert_array_equal(y["y"], [3, 4, 5])
        assert not x.flags.owndata
        assert type(x) is np.ndarray
    assert source.batch(np.asarray([], np.int64))[0].shape == (0, 2)
    with pytest.raises(IndexError):
        source.batch(np.asarray([10, 3]))


def test_arrays_of_different_length_are_refused_with_their_shapes():
    with pytest.raises(UsageError, match=r"\(3, 2\), \(4,\)"):
        ArraySource([0, 1], [np.zeros((3, 2)), np.zeros(4)])
