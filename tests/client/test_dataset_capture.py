"""Datasets as graphs: which can be shipped, and that runs on leased rows give every element once."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from nfdt_client.dataset_capture import ship
from nfdt_client.dataset_flow import Unshippable

from nfdt.core.errors import ProtocolError, UnreadableData
from nfdt.model.training.dataset_graph import DatasetGraph
from nfdt.model.training.dataset_run import DatasetRun, check_files
from nfdt.model.training.host_batches import as_batch
from nfdt.schedulers.pulled import RowSplits

N = 500
Dataset = tf.data.Dataset
IDS = np.arange(N)


class Workers:
    """Runs of one shipped dataset, which take turns, and share the rows."""

    def __init__(self, dataset, count=2):
        self.shipped = ship(dataset, count)
        graph = DatasetGraph.from_bytes(self.shipped.graph.to_bytes())
        splits = self._splits = RowSplits(self.shipped.rows, self.shipped.split)

        def taker(name):
            def take(iteration, pass_index, number):
                split = splits.take(name, iteration, pass_index, number)
                return None if split is None else (split.start, split.stop)

            return take

        self._runs = [DatasetRun(graph, self.shipped.arrays, 7, n, taker(f"worker-{n}")) for n in range(count)]

    def iterate(self, number, limit=None):
        """Return the batches of an iteration, at most ``limit``."""
        self._splits.begin(number)
        living = [run.iterate(number) for run in self._runs]
        found = []
        while living and (limit is None or len(found) < limit):
            for one in list(living):
                batch = next(one, None)
                if batch is None:
                    living.remove(one)
                else:
                    found.append(as_batch(batch))
        return found


def ids_of(batches):
    return np.concatenate([np.ravel(keras.tree.flatten(batch)[0]) for batch in batches]).astype(int)


def parsed(record):
    return tf.reshape(tf.io.parse_tensor(record, tf.int64), [])


@pytest.fixture
def records(tmp_path):
    """Twelve files with records of 5 numbers each."""
    for number in range(12):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord")) as file:
            for value in range(number * 5, number * 5 + 5):
                file.write(tf.io.serialize_tensor(np.int64(value)).numpy())
    return str(tmp_path / "*.tfrecord")


def labelled(value):
    return value, value * 2


PIPELINES = {
    "usual": (lambda: Dataset.from_tensor_slices(IDS).shuffle(N).map(labelled).batch(32).prefetch(2), 16),
    "parallel": (lambda: Dataset.range(N).map(labelled, num_parallel_calls=4).batch(32, num_parallel_calls=2), 16),
    "cached": (lambda: Dataset.range(N).map(labelled).cache().shuffle(10).batch(50), 10),
    "shuffled batches": (lambda: Dataset.range(N).batch(32).shuffle(100), 16),
    "filtered": (lambda: Dataset.range(2 * N).filter(lambda value: value < N).batch(32), None),
    "twice": (lambda: Dataset.range(N).batch(20).map(lambda values: values), 25),
    "zipped": (lambda: Dataset.zip(Dataset.range(N), Dataset.from_tensor_slices(IDS)).shuffle(N).batch(32), 16),
    "enumerated": (lambda: Dataset.from_tensor_slices(IDS * 3).enumerate().batch(32), 16),
    "sparse numbers": (lambda: Dataset.range(0, 3 * N, 3).map(lambda value: value // 3).batch(32), 16),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("count", [1, 3])
def test_every_element_comes_once_in_every_iteration(name, count):
    make, batches = PIPELINES[name]
    workers = Workers(make(), count)
    assert workers.shipped.batches == batches
    for iteration in (0, 1):
        found = workers.iterate(iteration)
        assert sorted(ids_of(found)) == list(range(N))
        assert batches is None or len(found) == batches


def test_shuffled_rows_come_in_another_order_in_every_iteration():
    workers = Workers(Dataset.range(N).shuffle(N).batch(32), 1)
    first, second = ids_of(workers.iterate(0)), ids_of(workers.iterate(1))
    assert list(first) != list(second)
    assert list(first) != sorted(first)
    fixed = Workers(Dataset.range(N).shuffle(N, seed=3, reshuffle_each_iteration=False).batch(32), 1)
    assert list(ids_of(fixed.iterate(0))) == list(ids_of(fixed.iterate(1)))


def test_parts_of_zipped_datasets_belong_together():
    workers = Workers(Dataset.zip(Dataset.range(N), Dataset.from_tensor_slices(IDS * 2)).shuffle(N).batch(32))
    for one, two in workers.iterate(0):
        assert list(two) == list(one * 2)


def test_repeat_gives_every_element_once_in_every_pass():
    endless = Workers(Dataset.range(N).shuffle(N).repeat().batch(50), 1)  # two may be in different passes
    assert endless.shipped.infinite
    assert endless.shipped.batches is None
    assert sorted(ids_of(endless.iterate(0, limit=20))) == sorted([*range(N)] * 2)
    thrice = Workers(Dataset.range(N).batch(50).repeat(3))
    assert thrice.shipped.batches == 30
    assert sorted(ids_of(thrice.iterate(0))) == sorted([*range(N)] * 3)


def test_take_and_skip_choose_rows():
    workers = Workers(Dataset.range(N).skip(100).take(64).shuffle(64).batch(16))
    assert workers.shipped.batches == 4
    assert sorted(ids_of(workers.iterate(0))) == list(range(100, 164))


def test_only_the_last_short_batch_is_dropped():
    workers = Workers(Dataset.range(N).shuffle(N).batch(32, drop_remainder=True), 3)
    assert workers.shipped.batches == 15
    assert len(set(ids_of(workers.iterate(0)))) == 480


@pytest.mark.feature("TFRecord files, shared by the workers", area="Data")
@pytest.mark.parametrize("interleaved", [True, False])
def test_files_are_shared(records, interleaved):
    if interleaved:
        dataset = Dataset.list_files(records).interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        dataset = tf.data.TFRecordDataset(sorted(tf.io.gfile.glob(records)))
    workers = Workers(dataset.map(parsed).shuffle(16).batch(8))
    header = workers.shipped.graph.header
    assert len(header.files) == 12
    check_files(header)
    assert workers.shipped.batches is None
    assert sorted(ids_of(workers.iterate(0))) == list(range(60))


def test_a_file_that_is_missing_or_another_one_is_named(records):
    names = sorted(tf.io.gfile.glob(records))
    header = ship(Dataset.from_tensor_slices(names).map(tf.io.read_file).batch(4), 1).graph.header
    with open(names[3], "ab") as file:
        file.write(b"more")
    with pytest.raises(UnreadableData, match=r"expected a file of \d+ bytes.*Received: a file of \d+ bytes on"):
        check_files(header)
    tf.io.gfile.remove(names[3])
    with pytest.raises(UnreadableData, match=f"{names[3]}.*no such file"):
        check_files(header)


def test_states_of_layers_and_tables_go_along():
    flip = keras.layers.RandomBrightness(0.5, value_range=(0, 1000), seed=1)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(IDS, IDS * 3), -1)
    image = tf.fill([1, 1, 3], 500.0)

    def augmented(value):
        return table.lookup(value), flip(image, training=True)[0, 0, 0]

    workers = Workers(Dataset.range(N).map(augmented).batch(50))
    rounds = [workers.iterate(0), workers.iterate(1)]
    assert sorted(ids_of(rounds[0])) == [*range(0, 3 * N, 3)]
    drawn = [value for batches in rounds for _, values in batches for value in values]
    assert len(set(drawn)) > 1.9 * N  # other numbers on every worker, and in every iteration


def generated():
    yield 1


REASONS = {
    "runs Python code": lambda: Dataset.from_generator(generated, output_signature=tf.TensorSpec((), tf.int64)),
    "py_function runs Python": lambda: Dataset.range(9).map(lambda v: tf.py_function(abs, [v], tf.int64)),
    "numpy_function or py_function": lambda: Dataset.range(9).map(lambda v: tf.numpy_function(abs, [v], tf.int64)),
    "concatenate needs": lambda: Dataset.range(9).concatenate(Dataset.range(9)),
    "take after a shuffle": lambda: Dataset.range(9).shuffle(9).take(3),
    "from_tensors needs": lambda: Dataset.from_tensors([1, 2]).repeat(4),
    "scan needs": lambda: Dataset.range(9).scan(np.int64(0), lambda a, b: (a, a + b)),
    "zip of datasets": lambda: Dataset.zip(Dataset.range(9), Dataset.range(9).filter(lambda v: v > 2)),
    "it has no element": lambda: Dataset.range(0),
    "a RaggedTensorSpec": lambda: Dataset.range(9).map(lambda v: tf.RaggedTensor.from_row_lengths([v], [1])),
    "it has 1 files": lambda: tf.data.TFRecordDataset(["/nothing"]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_shipped_says_why(reason):
    with pytest.raises(Unshippable, match=reason):
        ship(REASONS[reason]().batch(2), 2)


def test_a_large_graph_stays_here(monkeypatch):
    monkeypatch.setattr("nfdt_client.dataset_capture.MAX_GRAPH_BYTES", 2**10)
    large = tf.zeros([2**12])
    with pytest.raises(Unshippable, match="its graph has"):
        ship(Dataset.range(9).map(lambda value: value + tf.cast(large[0], tf.int64)).batch(2), 2)


def test_something_else_is_no_dataset():
    with pytest.raises(ProtocolError, match="expected a header"):
        DatasetGraph.from_bytes(b"NFDTDS1\n" + (100).to_bytes(8, "little"))
