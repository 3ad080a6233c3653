"""Tables of ``nfdt.Embedding`` in files: cut by rows, read by any reader of safetensors, and back again."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

import nfdt
from nfdt.core.errors import UsageError

ROWS, WIDTH = 8192, 16


def model(*names, here=True, rows=ROWS):
    inputs = keras.Input((3,), dtype="int32")
    layers = [nfdt.Embedding(rows, WIDTH, name=name) for name in names]
    for layer in layers if here else ():
        layer.make_rows()
    made = keras.Model(inputs, keras.layers.Concatenate()([layer(inputs) for layer in layers]))
    made.compile("sgd", "mse")
    return made


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(("file_mb", "files"), [(1024, 1), (0.25, 4), (0.2, 6), (1e-6, 2 * 600)])
def test_tables_come_back_from_files_of_limited_size(tmp_path, file_mb, files):
    rows = 600 if file_mb < 0.01 else ROWS
    made, other = model("users", "items", rows=rows), model("items", "users", rows=rows)
    nfdt.save_tables(made, tmp_path / "tables", file_mb=file_mb)
    written = sorted((tmp_path / "tables").glob("model-*.safetensors"))
    assert len(written) == files
    assert [file.name for file in written][:1] == [f"model-00001-of-{files:05d}.safetensors"]
    index = index_of(tmp_path / "tables")
    for name, file in list(index["weight_map"].items())[:20]:
        layer, array, first = name.split("/")
        found = load_file(tmp_path / "tables" / file)[name]
        wanted = made.get_layer(layer).embeddings.numpy()[int(first) :][: len(found)]
        assert array == "embeddings"
        np.testing.assert_array_equal(found, wanted)
    nfdt.load_tables(other, tmp_path / "tables")
    for layer in ("users", "items"):
        np.testing.assert_array_equal(
            other.get_layer(layer).embeddings.numpy(), made.get_layer(layer).embeddings.numpy()
        )


def test_a_table_that_is_not_trained_yet_is_made_as_it_is_written(tmp_path):
    made = model("items", here=False)
    nfdt.save_tables(made, tmp_path, file_mb=0.1)
    made.get_layer("items").make_rows()
    held = model("items")
    nfdt.load_tables(held, tmp_path)
    np.testing.assert_array_equal(
        held.get_layer("items").embeddings.numpy(), made.get_layer("items").embeddings.numpy()
    )
    with pytest.raises(UsageError, match=r"an open session\. Received: none"):
        nfdt.load_tables(model("items", here=False), tmp_path)


def test_what_does_not_fit_is_refused(tmp_path):
    made = model("items")
    with pytest.raises(UsageError, match="that save_tables has written"):
        nfdt.load_tables(made, tmp_path)
    nfdt.save_tables(made, tmp_path)
    with pytest.raises(UsageError, match="a folder without tables"):
        nfdt.save_tables(made, tmp_path)
    with pytest.raises(UsageError, match=r"layer 'users'. Received: none"):
        nfdt.load_tables(model("users"), tmp_path)
    with pytest.raises(UsageError, match=r"shape \(16, 16\).*Received: \(8192, 16\)"):
        nfdt.load_tables(model("items", rows=16), tmp_path)
    with pytest.raises(UsageError, match="layers nfdt.Embedding"):
        nfdt.save_tables(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), tmp_path)
    index = index_of(tmp_path)
    index["weight_map"] = {}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="expected 8192 rows of 'items/embeddings'"):
        nfdt.load_tables(made, tmp_path)
