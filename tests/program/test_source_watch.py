"""Changes of an object that was sent are found, and nothing else is taken for one."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.model.program.source_watch import LONG, SourceWatch, reaches

FACTOR = {"of": 1.0}


class Batches(keras.utils.PyDataset):
    shared = 0.0

    def __init__(self):
        super().__init__()
        self.level, self.parts, self.names = 0.0, {"far": [1, 2]}, [str(i) for i in range(2 * LONG)]
        self.small, self.large, self.kinds = np.zeros(8), np.zeros(2**20), {"one", "two"}
        self.weight, self.layer = keras.Variable(1.0), keras.layers.Dropout(0.5)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.large[index] * FACTOR["of"]


CHANGES = {
    "an attribute": lambda data: setattr(data, "level", 1.0),
    "a new attribute": lambda data: setattr(data, "other", 1.0),
    "an element of a list inside": lambda data: data.parts["far"].append(3),
    "an element of a long list": lambda data: data.names.__setitem__(17, "other"),
    "an element of a small array": lambda data: data.small.__setitem__(3, 1.0),
    "a large array": lambda data: setattr(data, "large", data.large.copy()),
    "all elements of a large array": lambda data: data.large.__setitem__(slice(None), 1.0),
    "a member of a set": lambda data: data.kinds.add("three"),
    "a variable": lambda data: data.weight.assign(2.0),
    "an attribute of a layer": lambda data: setattr(data.layer, "rate", 0.1),
    "the class": lambda data: setattr(type(data), "shared", type(data).shared + 1.0),
    "a global of the code": lambda data: FACTOR.update(of=FACTOR["of"] + 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_found_once(change):
    data = Batches()
    watch = SourceWatch((data, None))
    assert [watch.changed() for _ in range(3)] == [False] * 3
    change(data)
    assert [watch.changed() for _ in range(3)] == [True, False, False]


def test_one_element_of_a_large_array_is_found_when_the_check_is_cheap_beside_the_time_since_the_last():
    data, times = Batches(), iter(np.arange(0.0, 1e6, 0.5))
    watch = SourceWatch(data, clock=lambda: float(next(times)))
    data.large[2**19 + 5] = 1.0
    assert not watch.changed()
    found = [watch.changed_in_place() for _ in range(120)]
    assert sum(found) == 1
    assert found.index(True) > 90
    assert not watch.unchanged(data.large)


def test_an_array_is_unchanged_if_it_is_the_one_of_the_beginning_with_its_elements():
    data = Batches()
    watch = SourceWatch(data)
    assert watch.unchanged(data.large)
    assert not watch.unchanged(data.large.copy())


class Setting(keras.callbacks.Callback):
    def __init__(self, change):
        super().__init__()
        self.change, self.lock = change, iter(())  # an iterator cannot be pickled


def test_a_callback_reaches_what_its_code_or_its_attributes_refer_to():
    data, variable, other = Batches(), keras.Variable(0.0), Batches()

    def change(epoch, logs=None):
        data.level = variable.value

    for callback in (Setting(change), keras.callbacks.LambdaCallback(on_epoch_begin=change)):
        assert reaches([callback], [data])
        assert reaches([callback], [variable.value])
        assert not reaches([callback], [other])
    assert reaches(Setting({"held": [other]}), [other])
    assert not reaches(None, [data])
