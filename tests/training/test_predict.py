"""Outputs of batches as bytes, and their order."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.arrays.safetensors_io import dump_arrays
from nfdt.core.errors import CaptureError, ProtocolError
from nfdt.model.training import steps
from nfdt.model.training.predict import dump_outputs, join_outputs, load_outputs
from nfdt.model.training.steps import prediction_step

keras = pytest.importorskip("keras")

DTYPES = ("float32", "float64", "float16", "int64", "uint8", "bool")


def outputs(*rows, width=2):
    return {row: [np.full((width, 3), row, "float32"), np.arange(row, row + width)] for row in rows}


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_keep_values_shapes_and_dtypes(dtype):
    leaves = [np.arange(6).reshape(3, 2).astype(dtype), np.zeros((3, 0), dtype)]
    (received,) = load_outputs(dump_outputs({7: leaves})).values()
    for mine, other in zip(received, leaves, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def test_eleven_leaves_keep_their_order():
    leaves = [np.array([number]) for number in range(11)]
    assert [int(leaf[0]) for leaf in load_outputs(dump_outputs({0: leaves}))[0]] == list(range(11))


def test_batches_are_joined_in_the_order_of_their_rows_whoever_sent_them():
    joined = join_outputs([outputs(10, 2, 6), outputs(4, 0), outputs(8)], range(0, 12, 2))
    assert joined[0][:, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    assert joined[1].tolist() == list(range(12))
    assert [leaf.shape for leaf in join_outputs([outputs(0, width=5)], [0])] == [(5, 3), (5,)]


@pytest.mark.parametrize(
    "pieces",
    [[], [outputs(2)], [outputs(0, 4)], [outputs(0, 2), {4: [np.zeros(2)]}], [outputs(0, 2, 4, 6)]],
    ids=["none", "no first", "a gap", "fewer leaves", "too many"],
)
def test_missing_or_unlike_batches_are_refused(pieces):
    with pytest.raises(ProtocolError, match="expected those of 3 batches"):
        join_outputs(pieces, range(0, 6, 2))


@pytest.mark.parametrize("name", ["loss", "x/0", "3/x", "3/1", ""])
def test_other_arrays_are_no_outputs(name):
    with pytest.raises(ProtocolError, match="ROW/LEAF"):
        load_outputs(dump_arrays({name: np.zeros(2)}))


def test_outputs_that_exceed_a_message_are_refused(monkeypatch):
    from nfdt.model.program.pack import layout_of

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    layout = layout_of(model)
    weights = layout.flatten([np.asarray(variable) for variable in model.trainable_variables])
    step, batch = prediction_step(model, layout), (np.ones((3, 2), "float32"),)
    np.testing.assert_array_equal(step(weights, batch)[0], model.predict(batch[0], verbose=0))
    monkeypatch.setattr(steps, "MAX_OUTPUT_BYTES", 47)
    with pytest.raises(CaptureError, match="at most 47 bytes per batch. Received: 48"):
        step(weights, batch)
