import numpy as np
import pytest

from nfdt.core.arrays.safetensors_io import dump_arrays, dump_parts, load_arrays
from nfdt.core.errors import ProtocolError
from nfdt.model.program.state import dump_state, load_state


def test_a_state_comes_back_as_it_was(tmp_path):
    weights = np.arange(5, dtype=np.float32)
    optimizer = {0: np.asarray(7, np.int64), 3: np.ones((2, 3), np.float32).T}
    untrained = {0: np.asarray([1, 2], np.uint32), 12: np.zeros((0,), np.float16)}
    data = dump_state(weights, optimizer, untrained)
    path = tmp_path / "state"
    path.write_bytes(data)
    for state in (load_state(data), load_state(path)):
        np.testing.assert_array_equal(state.weights, weights)
        for got, want in ((state.optimizer, optimizer), (state.untrained, untrained)):
            assert list(got) == list(want)
            for index, array in want.items():
                assert got[index].shape == array.shape
                assert got[index].dtype == array.dtype
                np.testing.assert_array_equal(got[index], array)


def test_bfloat16_is_stored_exactly_as_float32():
    import ml_dtypes

    state = load_state(dump_state(np.zeros(1), {0: np.asarray([1.5, -3.0], ml_dtypes.bfloat16)}, {}))
    np.testing.assert_array_equal(state.optimizer[0], np.asarray([1.5, -3.0], np.float32))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a state",
        dump_arrays({"optimizer/0": np.zeros(1)}),
        dump_arrays({"weights": np.zeros(3, np.float64)}),
        dump_arrays({"weights": np.zeros((3, 1), np.float32)}),
        dump_arrays({"weights": np.zeros(3, np.float32), "../x": np.zeros(1)}),
        dump_arrays({"weights": np.zeros(3, np.float32), "optimizer/-1": np.zeros(1)}),
    ],
)
def test_what_is_not_a_state_is_refused(data):
    with pytest.raises(ProtocolError, match="expected"):
        load_state(data)


DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64".split()


def test_parts_are_the_same_file_as_the_whole():
    arrays = {f"{name}/{i}": np.ones((i, 3), name) for name in DTYPES for i in (0, 1, 2)}
    arrays |= {"scalar": np.float32(2.5), "transposed": np.arange(6, dtype="f4").reshape(2, 3).T}
    whole = b"".join(dump_parts(arrays))
    found = load_arrays(whole)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
    assert len(whole) == len(dump_arrays(arrays))


def test_parts_are_no_copies():
    weights = np.arange(1000, dtype=np.float32)
    _, content = dump_parts({"weights": weights})
    assert np.shares_memory(np.frombuffer(content, np.uint8), weights)
