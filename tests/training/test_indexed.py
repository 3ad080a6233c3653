"""Batches of a PyDataset on a worker: read ahead, each index once, hooks once per epoch and alike in all copies."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from nfdt.core.errors import UnreadableData
from nfdt.model.program.shipped_data import LARGE_BYTES, dump_source, load_source
from nfdt.model.training.sources import ChangeableSource, IndexedSource

keras = pytest.importorskip("keras")


class Batches(keras.utils.PyDataset):
    def __init__(self, count=8, **options):
        super().__init__(**options)
        self.count, self.calls, self.order = count, [], np.arange(count)
        self.lock = threading.Lock()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        with self.lock:
            self.calls.append(index)
        rows = 2 + index % 2
        return np.full((rows, 3), self.order[index], "float32"), np.full((rows, 1), index, "int64")

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        np.random.shuffle(self.order)
        self.draw = random.random()


def one(index: int) -> slice:
    return slice(index, index + 1)


@pytest.mark.feature("`PyDataset`, read on the workers", area="Data")
def test_a_batch_is_what_keras_gives_to_train_step():
    source = IndexedSource(Batches(), {0: 1.0, 3: 5.0}, 8, 0)
    x, y, weight = source.batch(np.array([3]))
    assert x.shape == (3, 3)
    assert y.tolist() == [[3], [3], [3]]
    assert weight.ravel().tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_read_ahead_and_each_once(threads):
    dataset = Batches(workers=threads, max_queue_size=2)
    source = IndexedSource(dataset, None, 8, 0)
    source.prefetch([one(i) for i in range(6)])
    got = [int(source.batch(one(i))[1][0, 0]) for i in range(6)]
    assert got == list(range(6))
    assert sorted(dataset.calls) == list(range(6))


def test_what_another_lease_wants_is_kept_and_the_rest_is_forgotten():
    dataset = Batches()
    source = IndexedSource(dataset, None, 8, 0)
    source.prefetch([one(0), one(1)])
    source.batch(one(0))
    source.prefetch([one(1), one(5)])
    for index in (1, 5, 0):
        source.batch(one(index))
    assert sorted(dataset.calls) == [0, 0, 1, 5]


def test_hooks_are_called_once_per_epoch_and_a_later_copy_catches_up():
    early, late = Batches(), Batches()
    sources = [IndexedSource(dataset, None, 8, 7) for dataset in (early, late)]
    for epoch in (2, 3):
        sources[0].begin_epoch(epoch, 2)
        sources[0].begin_epoch(epoch, 2)
        np.random.random(epoch)  # the copies' generators differ
        sources[0].end_epoch()
        sources[0].end_epoch()
    sources[0].begin_epoch(4, 2)
    sources[1].begin_epoch(4, 2)
    assert early.calls == late.calls == ["begin", "end", "begin", "end", "begin"]
    assert early.order.tolist() == late.order.tolist() != list(range(8))
    assert early.draw == late.draw


def test_a_hook_leaves_the_generators_as_they_were():
    np.random.seed(3)
    random.seed(3)
    want = np.random.random(), random.random()
    np.random.seed(3)
    random.seed(3)
    source = IndexedSource(Batches(), None, 8, 0)
    source.begin_epoch(0, 0)
    source.end_epoch()
    assert (np.random.random(), random.random()) == want


class Broken(Batches):
    def __getitem__(self, index):
        raise FileNotFoundError(2, "No such file", "/data/a.png")


@pytest.mark.parametrize(
    ("source", "reason"),
    [(IndexedSource(Broken(), None, 8, 0), "/data/a.png"), (IndexedSource(Batches(5), None, 8, 0), "has 5 batches")],
)
def test_data_that_are_not_on_this_machine_are_reported(source, reason):
    with pytest.raises(UnreadableData, match=reason):
        source.check()


class Holder:
    def __init__(self, array):
        self.one = self.two = array
        self.small = array[:3].copy()


def test_large_arrays_travel_beside_the_code_and_may_be_written_to(tmp_path):
    array = np.arange(LARGE_BYTES, dtype=np.int64).reshape(-1, 8)
    shipped = dump_source(Holder(array))
    assert len(shipped.arrays) == 1
    assert len(shipped.code) < LARGE_BYTES
    np.save(tmp_path / "a.npy", shipped.arrays[0])
    got = load_source(shipped.code, ["a"], lambda name: np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    assert got.one is got.two
    assert np.array_equal(got.one, array)
    assert np.array_equal(got.small, array[:3])
    got.one[0] = -1
    assert np.array_equal(np.load(tmp_path / "a.npy"), array), "the file is shared"


def test_what_cannot_be_pickled_is_reported():
    with pytest.raises(UnreadableData, match="cannot be pickled"):
        dump_source(threading.Lock())


def test_a_changed_dataset_replaces_the_one_whose_batches_are_read_ahead():
    source, other, loads = IndexedSource(Batches(), None, 8, 0), Batches(), []
    other.order += 100

    def load(code):
        loads.append(code)
        return (other if code else Batches()), None

    changed = ChangeableSource(source, load)
    source.prefetch([one(index) for index in range(4)])
    for _ in range(2):  # as each epoch begins
        changed.assign(np.frombuffer(b"other", np.uint8))
    assert loads == [b"other"]
    assert source.batch(one(2))[0][0, 0] == 102
    changed.assign(np.zeros(0, np.uint8))
    assert source.batch(one(2))[0][0, 0] == 2
