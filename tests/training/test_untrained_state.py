import keras
import numpy as np
import pytest
from keras import layers

from nfdt.core.errors import ShapeMismatch
from nfdt.model.training.merge import decode_arrays, encode_arrays, merge_untrained
from nfdt.model.training.untrained_state import UntrainedState, fold_seed


class Counting(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.average.assign(keras.ops.mean(x))
        return x


@pytest.fixture
def there(worker, batches):
    model = keras.Sequential(
        [Counting(), layers.Dense(3), layers.BatchNormalization(momentum=0.9), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return worker(model, batches[0])


def test_kinds_and_their_rules(there):
    kinds = {entry["path"].split("/")[-1]: entry["rule"] for entry in there.manifest.untrained}
    assert kinds["moving_mean"] == kinds["moving_variance"] == "ema"
    assert kinds["seed_generator_state"] == "seed"
    assert sorted(kinds.values()) == ["ema", "ema", "max", "mean", "seed"]
    assert {entry["decay"] for entry in there.manifest.untrained} == {0.9, None}


def test_worker_0_keeps_the_users_seeds_and_the_others_fold_their_index_in(there):
    index = [entry["rule"] for entry in there.manifest.untrained].index("seed")
    before = UntrainedState(there.model, there.manifest.untrained_rules, worker=0).read()
    same = UntrainedState(there.model, there.manifest.untrained_rules, worker=0)
    np.testing.assert_array_equal(same.read()[index], before[index])
    other = UntrainedState(there.model, there.manifest.untrained_rules, worker=2)
    own = other.read()[index]
    np.testing.assert_array_equal(own, fold_seed(before[index], 2))
    assert own[0] != before[index][0]
    other.write(before)
    np.testing.assert_array_equal(other.read()[index], own)
    same.write(before)
    np.testing.assert_array_equal(same.read()[index], before[index])


def test_folded_seeds_differ_between_workers():
    assert len({int(fold_seed(np.asarray([7, 3]), i)[0]) for i in range(1, 100)}) == 99
    assert fold_seed(np.asarray([2**31 - 1, 3]), 1)[1] == 3


def test_state_survives_reading_merging_and_writing(there, batches):
    state = UntrainedState(there.model, there.manifest.untrained_rules, worker=0)
    base = state.read()
    for batch in batches[:3]:
        there.step(np.asarray(there.weights), batch)
    mine = decode_arrays(encode_arrays(state.read()))
    merged = merge_untrained(there.manifest.untrained, base, [(0, 3, mine), (1, 0, base)])
    state.write(merged)
    for a, b in zip(state.read(), mine, strict=True):
        assert a.tobytes() == b.tobytes()


def test_another_models_state_is_refused(there):
    state = UntrainedState(there.model, there.manifest.untrained_rules, worker=0)
    with pytest.raises(ShapeMismatch, match="another model"):
        state.write(state.read()[:-1])
    with pytest.raises(ShapeMismatch, match="as the program says"):
        UntrainedState(there.model, [], worker=0)
