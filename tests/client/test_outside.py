"""Values besides the model: sent when the script has changed them, taken when workers have."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from nfdt_client.outside import ChangedData, Outside
from nfdt_client.training_data import Indexed, Stream, read

from nfdt.core.errors import UnreadableData
from nfdt.model.program.shipped_data import LARGE_BYTES, load_source


@pytest.fixture
def variable():
    return keras.Variable(1.0, name="level")


def test_a_change_of_the_script_is_named_until_it_is_sent(variable):
    outside = Outside([variable])
    assert outside.changed() == []
    variable.assign(2.0)
    assert outside.changed() == ["level"]
    outside.mark_sent()
    assert outside.changed() == []


def test_the_clusters_value_counts_where_the_script_has_set_none(variable):
    outside = Outside([variable])
    outside.assign_new([np.float32(5.0)])
    assert float(variable) == 5.0
    assert outside.changed() == []


def test_the_scripts_value_counts_where_both_have_set_one(variable):
    outside = Outside([variable])
    variable.assign(3.0)
    outside.assign_new([np.float32(1.0)])  # as it was sent
    assert float(variable) == 3.0
    outside.assign_new([np.float32(5.0)])
    assert float(variable) == 3.0
    assert outside.changed() == ["level"]


def test_a_fixed_value_that_changes_is_an_error_with_its_name_and_the_remedy(variable):
    outside = Outside([], [(variable, "Do this.")])
    outside.changed()
    variable.assign(2.0)
    with pytest.raises(UnreadableData, match=r"level was changed .* Do this\."):
        outside.changed()


class Batches(keras.utils.PyDataset):
    def __init__(self, count=4):
        super().__init__()
        self.count, self.level, self.large, self.other = count, 0.0, np.zeros(LARGE_BYTES), np.ones(LARGE_BYTES)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.zeros((2, 3)), np.full((2, 1), self.level)


def sent(dataset):
    stream = read(dataset)
    assert isinstance(stream, Stream)
    data = Indexed.of(stream, dataset, None)
    return data, ChangedData(data, "train")


def test_changed_data_are_pickled_with_references_to_the_arrays_that_are_as_before():
    dataset = Batches()
    data, member = sent(dataset)
    assert member.numpy().size == 0
    dataset.level, dataset.other = 2.0, np.full(LARGE_BYTES, 3.0)
    code = member.numpy()
    assert 8 * LARGE_BYTES < code.nbytes < 9 * LARGE_BYTES
    assert member.numpy() is code
    arrays = {str(number): array for number, array in enumerate(data.shipped.arrays)}
    loaded, _ = load_source(code.tobytes(), list(arrays), arrays.__getitem__)
    assert (loaded.level, loaded.large[0], loaded.other[0]) == (2.0, 0.0, 3.0)


def test_data_that_change_too_much_or_their_number_of_batches_are_refused():
    dataset = Batches()
    _, member = sent(dataset)
    dataset.count = 5
    with pytest.raises(UnreadableData, match="data='client'"):
        member.numpy()
    dataset.count, dataset.large = 4, np.ones(2**22)
    with pytest.raises(UnreadableData, match="at most 16 MB"):
        member.numpy()


def test_changes_before_the_job_are_sent_with_it():
    dataset = Batches()
    data, _ = sent(dataset)
    assert data.renewed() is data
    dataset.level = 1.0
    renewed = data.head(3).renewed()
    assert renewed.shipped.code != data.shipped.code
    assert (renewed.batches, renewed.whole) == (3, 4)
