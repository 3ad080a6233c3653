"""Steps whose tables are on the shards: row numbers ahead of a step, and gradients of the rows of a batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import ChangedRows, Rows, RowVector, RowWeights
from nfdt.core.errors import CaptureError, ModelMismatch
from nfdt.model.backends.contract import current
from nfdt.model.backends.tensorflow_step import GradientStep
from nfdt.model.keras_internals.models import has_no_rows, without_rows
from nfdt.model.program.pack import pack
from nfdt.model.program.unpack import unpack_with_variables

WORDS, WIDTH = 9000, 8
MODES = {"graph": {"jit_compile": False}, "xla": {"jit_compile": True}, "float16": {"dtype": "mixed_float16"}}


def values(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def model(dtype="float32", **options):
    keras.utils.set_random_seed(3)
    inputs, others = (keras.Input((3,), dtype="int32") for _ in range(2))
    table = keras.layers.Embedding(WORDS, WIDTH, dtype=dtype)
    rows = [table(inputs), table(others), keras.layers.Embedding(WORDS, WIDTH, dtype=dtype)(inputs)]
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(each) for each in rows])
    made = keras.Model([inputs, others], keras.layers.Dense(2, dtype=dtype)(joined))
    made.compile("sgd", "mse", **options)
    return made


def rowless(build, **options):
    """Return a model with rows in place of its tables."""
    with without_rows({(WORDS, WIDTH)}):
        made = build(**options)
    current().use_rows(made, [i for i, v in enumerate(made.trainable_variables) if has_no_rows(v)])
    return made


def layout_of(made):
    return ParameterLayout.of([(v.path, v.shape) for v in made.trainable_variables])


def batch(seed, samples=6):
    x = [np.random.default_rng(seed + i).integers(-20, WORDS, (samples, 3)).astype("int32") for i in range(2)]
    return tuple(x), values((samples, 2), seed)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_the_whole_table(mode):
    options = MODES[mode]
    whole, rows = model(**options), rowless(model, **options)
    layout = layout_of(whole)
    assert [slot.shape for slot in layout_of(rows).slots] == [slot.shape for slot in layout.slots]
    expected, step = GradientStep(whole, layout, tables=(0, 1)), GradientStep(rows, layout, tables=(0, 1))
    tables, dense = [values((WORDS, WIDTH), seed) for seed in (1, 2)], values(layout.without((0, 1)).size, 3)
    news = [ChangedRows(index, 0, table) for index, table in enumerate(tables)]
    for turn, samples in enumerate((6, 6, 4)):
        data = batch(turn, samples)
        wanted = expected(RowWeights(dense, [] if turn else news), data)
        numbers = step.row_numbers(step.prepare(data))
        first = np.unique(np.concatenate([each % WORDS for each in data[0]]))
        assert [index.tolist() for index in numbers] == [first.tolist(), np.unique(data[0][0] % WORDS).tolist()]
        held = [Rows(index, table[index]) for index, table in zip(numbers, tables, strict=True)]
        found = step(RowVector(dense, tuple(held)), data)
        np.testing.assert_array_equal(found.gradient.dense, wanted.gradient.dense)
        for mine, theirs in zip(found.gradient.rows, wanted.gradient.rows, strict=True):
            np.testing.assert_array_equal(mine.index, theirs.index)
            np.testing.assert_array_equal(mine.values, theirs.values)
        assert float(found.logs["loss"]) == float(wanted.logs["loss"])


@pytest.mark.parametrize("number", [WORDS, -WORDS - 1])
def test_a_number_out_of_range_is_an_error_as_in_keras(number):
    data = batch(1)
    data[0][0][2, 1] = number
    made = model()
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"is not in \[0, {WORDS}\)"):
        made.train_on_batch(*data)
    rows = rowless(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"is not in \[0, {WORDS}\)"):
        GradientStep(rows, layout_of(rows), tables=(0, 1)).row_numbers(data)


def test_numbers_come_through_layers_without_weights():
    def build():
        text, number = keras.Input((2,), dtype="string"), keras.Input((1,), dtype="float32")
        names = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(text)
        hashed = keras.layers.Hashing(WORDS)(text)
        table = keras.layers.Embedding(WORDS, WIDTH)
        rows = [table(names), keras.layers.Embedding(WORDS, WIDTH)(hashed), table(keras.ops.cast(number * 2, "int32"))]
        made = keras.Model([text, number], keras.layers.Dense(1)(keras.layers.Concatenate(axis=1)(rows)))
        made.compile("sgd", "mse")
        return made

    rows = rowless(build)
    step = GradientStep(rows, layout_of(rows), tables=(0, 1))
    x = np.array([["a", "c"], ["z", "a"]]), np.array([[7.0], [2.5]], "float32")
    found = step.row_numbers((x, np.zeros((2, 5, 1), "float32")))
    assert found[0].tolist() == [0, 1, 3, 5, 14]
    assert found[1].tolist() == np.unique(keras.layers.Hashing(WORDS)(x[0])).tolist()


class OfItsOwn(keras.Model):
    """Model that calls its embedding in a way that needs the values of a step."""

    def __init__(self, way):
        super().__init__()
        self.way, self.table = way, keras.layers.Embedding(WORDS, WIDTH)
        self.scores, self.last = keras.layers.Dense(WORDS // 100), keras.layers.Dense(1)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        rows = self.table(x)
        ids = {
            "subclass": lambda: x + 1,
            "weights": lambda: keras.ops.argmax(self.scores(rows), -1),
            "random": lambda: keras.random.randint(keras.ops.shape(x), 0, WORDS, seed=self.seed),
            "python": lambda: tf.numpy_function(lambda a: a, [x], tf.int32, stateful=True),
            "inner graph": lambda: x,
            "tied": lambda: x,
        }[self.way]()
        if self.way == "inner graph":
            return self.last(rows + tf.function(self.table)(ids))
        if self.way == "tied":
            return self.last(rows) + keras.ops.sum(keras.ops.matmul(rows, keras.ops.transpose(self.table.embeddings)))
        return self.last(rows + self.table(keras.ops.reshape(ids, keras.ops.shape(x))))


@pytest.mark.parametrize("way", ["subclass", "weights", "random", "python", "inner graph", "tied"])
def test_tables_may_be_on_the_shards_if_lookups_follow_from_the_batch_alone(way):
    made = OfItsOwn(way)
    made.compile("sgd", "mse")
    manifest = pack(made, (np.zeros((4, 3), "int32"), np.zeros((4, 3, 1), "float32"))).manifest
    assert manifest.tables == [0]
    assert manifest.looked_up == ([0] if way == "subclass" else [])


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_models_that_run_eagerly_have_whole_tables(options):
    found = pack(model(**options), batch(1)).manifest
    assert found.looked_up == ([] if "run_eagerly" in options else [0, 1])
    assert pack(model(**options), batch(1)[:1], predicts=True).manifest.looked_up == found.looked_up


def test_a_step_that_needs_more_than_the_batch_is_refused_on_a_worker():
    with without_rows({(WORDS, WIDTH)}):
        made = OfItsOwn("weights")
        made.compile("sgd", "mse")
        made(np.zeros((4, 3), "int32"))
    current().use_rows(made, [0])
    step = GradientStep(made, layout_of(made), tables=(0,))
    with pytest.raises(CaptureError, match=r"expected row numbers that follow from the batch.*worker_tables_mb"):
        step.row_numbers((np.zeros((4, 3), "int32"), np.zeros((4, 3, 1), "float32")))


class Subclassed(keras.Model):
    """Model that is sent by value."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.last = keras.layers.Embedding(rows, 64), keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.table(x))


def configured(rows):
    """Return a model that is sent as its configuration."""
    return keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(rows, 64), keras.layers.Dense(1)])


WORKER = """
import json, os, resource, sys
import numpy as np
from nfdt.core.arrays.table_rows import Rows, RowVector
from nfdt.model.backends.contract import current
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.unpack import unpack_with_variables
from nfdt.model.training.steps import make_step

def run(folder):
    def read_ranges(name, ranges):
        with open(os.path.join(folder, name), "rb") as file:
            return b"".join([os.pread(file.fileno(), length, offset) for offset, length in ranges])

    def read(name):
        assert name != manifest.state, "the whole state"
        return open(os.path.join(folder, name), "rb").read()

    manifest = Manifest.from_bytes(open(os.path.join(folder, "manifest"), "rb").read())
    model, _ = unpack_with_variables(manifest, read, allow_code=True, tables=(0,), read_ranges=read_ranges)
    step = make_step(model, manifest, (0,))
    batch = np.array([[1, 2, 3], [4, 5, 5]], "int32"), np.ones((2, 3, 1), "float32")
    dense = np.zeros(manifest.layout.without((0,)).size, np.float32)
    numbers = step.row_numbers(batch)
    weights = RowVector(dense, tuple(Rows(index, np.ones((index.size, 64), np.float32)) for index in numbers))
    assert step(weights, batch).gradient.rows[0].values.shape[1] == 64
    current().call(model, manifest.layout, "test_step")(weights, batch)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

small, large = (run(folder) for folder in sys.argv[1:])
print(json.dumps(large - small))
"""


@pytest.mark.processes
@pytest.mark.parametrize("build", [configured, Subclassed])
def test_a_worker_needs_no_memory_for_a_table_on_the_shards(build, tmp_path):
    """Case: a table of 200 MB, after one of 0.3 MB has filled the memory that TensorFlow always needs."""
    for name, rows in (("small", 1100), ("large", 780_000)):
        folder = tmp_path / name
        folder.mkdir()
        made = build(rows)
        made.compile("sgd", "mse")
        packed = pack(made, (np.zeros((4, 3), "int32"), np.zeros((4, 3, 1), "float32")))
        assert packed.manifest.looked_up == [0]
        for artifact, content in {**packed.artifacts, "manifest": packed.manifest.to_bytes()}.items():
            (folder / artifact).write_bytes(content)
    script = [sys.executable, "-c", WORKER, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) < 40  # MB


def test_a_worker_builds_another_model_than_the_scripts_with_an_error():
    made = configured(1100)
    made.compile("sgd", "mse")
    packed = pack(made, (np.arange(12, dtype="int32").reshape(4, 3), np.zeros((4, 3, 1), "float32")))
    manifest, artifacts = packed.manifest, packed.artifacts

    def read_ranges(name, ranges):
        found = [artifacts[name][start : start + length] for start, length in ranges]
        # Of a request for rows alone, each row is another one.
        return b"".join(found[::-1] if name == manifest.state and {length for _, length in ranges} == {256} else found)

    with pytest.raises(ModelMismatch):
        unpack_with_variables(manifest, artifacts.__getitem__, allow_code=False, tables=(0,), read_ranges=read_ranges)
