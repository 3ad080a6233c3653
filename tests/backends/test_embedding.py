"""The layer whose table is on the shards: without memory in the script, made from the seed of its initializer."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.core.errors import CaptureError, UsageError
from nfdt.model.backends.embedding import Embedding, zero_rows
from nfdt.model.keras_internals.models import has_no_rows
from nfdt.model.program.pack import pack
from nfdt.model.program.unpack import unpack_with_variables

ROWS, WIDTH = 8192, 16
X, Y = np.arange(12, dtype="int32").reshape(4, 3), np.zeros((4, 1), "float32")


def model(rows=ROWS, optimizer="adagrad", **options):
    """Return a model with a table of its own besides."""
    inputs = keras.Input((3,), dtype="int32")
    looked_up = [Embedding(rows, WIDTH, name="items", **options)(inputs), keras.layers.Embedding(rows, WIDTH)(inputs)]
    flat = keras.layers.Flatten()(keras.layers.Concatenate()(looked_up))
    made = keras.Model(inputs, keras.layers.Dense(1)(flat))
    made.compile(optimizer, "mse")
    return made


def test_a_large_table_takes_no_memory_and_is_counted():
    layer = Embedding(10**9, WIDTH)
    layer.build()
    assert layer.count_params() == WIDTH * 10**9


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.RandomUniform(-1.0, 3.0, seed=1),
        keras.initializers.RandomNormal(2.0, 0.5, seed=2),
        keras.initializers.TruncatedNormal(1.0, 2.0, seed=3),
        keras.initializers.GlorotUniform(seed=4),
        keras.initializers.GlorotNormal(seed=5),
        keras.initializers.HeNormal(seed=6),
        keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=7),
        keras.initializers.Zeros(),
        keras.initializers.Ones(),
        keras.initializers.Constant(0.25),
    ],
    ids=lambda one: type(one).__name__,
)
def test_rows_have_the_distribution_of_the_initializer(initializer):
    layer = Embedding(ROWS, WIDTH, initializer)
    layer.make_rows()
    found, wanted = layer.embeddings.numpy(), np.asarray(initializer((ROWS, WIDTH)))
    scale = max(float(np.abs(wanted).max()), 1e-6)
    for moment in (np.mean, np.std, np.min, np.max):
        assert abs(moment(found) - moment(wanted)) < (0.02 if moment in (np.mean, np.std) else 0.4) * scale, moment


def test_the_seed_of_the_script_determines_the_rows():
    tables = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        layer = Embedding(ROWS, WIDTH)
        layer.make_rows()
        tables.append(layer.embeddings.numpy())
    np.testing.assert_array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[0], tables[2])


def test_a_call_in_this_process_is_an_error_with_a_remedy():
    made = model()
    for call in (lambda: made(X), lambda: made.predict(X, verbose=0), lambda: made.fit(X, Y, verbose=0)):
        with pytest.raises(UsageError, match=r"'items'.*on the shards alone(.|\n)*make_rows\(\)"):
            call()
    with zero_rows():
        np.testing.assert_array_equal(made.get_layer("items")(X), np.zeros((4, 3, WIDTH)))
    small = model(rows=100)
    assert small.get_layer("items")(X).numpy().any()


def test_a_table_that_was_made_here_trains_as_an_ordinary_one():
    made = model(rows=100)
    layer = Embedding(ROWS, WIDTH)
    layer.make_rows()
    assert not has_no_rows(layer.embeddings)
    before = layer.embeddings.numpy().copy()
    own = keras.Sequential([keras.Input((3,), dtype="int32"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    own.compile("sgd", "mse")
    own.fit(X, Y + 1, verbose=0)
    assert np.flatnonzero((layer.embeddings.numpy() != before).any(1)).tolist() == list(range(12))
    manifest = pack(own, (X, Y), sparse=True).manifest
    assert manifest.made == {}
    assert manifest.tables == [0]
    assert made.fit(X, Y, verbose=0).history["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings_regularizer": "l2"}, "no embeddings_regularizer"),
        ({"embeddings_constraint": "non_neg"}, "no embeddings_constraint"),
        ({"lora_rank": 2}, "no lora_rank"),
        ({"weights": [np.zeros((ROWS, WIDTH))]}, "no weights"),
        ({"embeddings_initializer": "orthogonal"}, "elements are independent"),
        ({"embeddings_initializer": lambda shape, dtype=None: keras.ops.ones(shape)}, "elements are independent"),
        (
            {"embeddings_initializer": keras.initializers.RandomUniform(seed=keras.random.SeedGenerator(1))},
            "a number as its seed",
        ),
    ],
)
def test_what_concerns_all_rows_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Embedding(ROWS, WIDTH, **options)


@pytest.mark.parametrize("by_value", [False, True])
def test_a_program_has_neither_the_table_nor_its_optimizer_variables(by_value):
    class OfTheScript(keras.Model):
        pass

    made = model(optimizer=keras.optimizers.Adagrad(0.1))
    if by_value:
        made = OfTheScript(made.inputs, made.outputs)
        made.compile(keras.optimizers.Adagrad(0.1), "mse")
    packed = pack(made, (X, Y), sparse=True)
    assert packed.code == by_value
    manifest = packed.manifest
    assert manifest.tables == manifest.looked_up == [0, 1]
    assert manifest.made.keys() == {0}
    assert manifest.made[0].rows == made.get_layer("items").seeded_rows
    assert manifest.layout.size == made.count_params()
    whole = 4 * ROWS * WIDTH
    assert 2 * whole < sum(len(part) for part in packed.state_parts) < 2.1 * whole
    assert all(has_no_rows(v) == ("items" in v.path) for v in made.optimizer.variables[2:])
    assert manifest.check is not None
    found = unpacked(packed)
    assert type(found.get_layer("items")) is Embedding
    assert has_no_rows(found.get_layer("items").embeddings)


def unpacked(packed):
    """Return the model of a worker that looks rows up."""

    def ranges(name, wanted):
        return b"".join([packed.artifacts[name][start : start + length] for start, length in wanted])

    read = packed.artifacts.__getitem__
    return unpack_with_variables(packed.manifest, read, allow_code=True, tables=(0, 1), read_ranges=ranges)[0]


def test_a_frozen_table_is_refused():
    made = model()
    made.get_layer("items").trainable = False
    with pytest.raises(CaptureError, match="a trainable table"):
        pack(made, (X, Y), sparse=True)


def test_a_saved_model_has_the_layer_without_its_table(tmp_path):
    made = model()
    made.save(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").stat().st_size < 1.5 * 4 * ROWS * WIDTH
    found = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert found.get_layer("items").get_config() == made.get_layer("items").get_config()
    assert has_no_rows(found.get_layer("items").embeddings)
    layers = [Embedding(ROWS, WIDTH), Embedding(ROWS, WIDTH), Embedding(ROWS, WIDTH)]
    for layer in layers[:2]:
        layer.make_rows()
    held, other, rowless = (keras.Sequential([keras.Input((3,), dtype="int32"), layer]) for layer in layers)
    held.save_weights(tmp_path / "held.weights.h5")
    other.load_weights(tmp_path / "held.weights.h5")
    np.testing.assert_array_equal(other(X), held(X))
    with pytest.raises(ValueError, match=r"make_rows\(\) of the layer before loading"):
        rowless.load_weights(tmp_path / "held.weights.h5")
