"""Metrics that several workers cannot count together: refused on the client, without side effects of the check."""

import keras
import numpy as np
import pytest
from keras import ops

from nfdt.core.errors import CaptureError
from nfdt.model.program.building import build_model
from nfdt.model.program.evaluation_check import check_metrics

X, Y = np.linspace(-1, 1, 24).astype("f4").reshape(8, 3), np.zeros((8, 1), "f4")


class Own(keras.metrics.Metric):
    """Metric that counts by a function of two variables and the predictions."""

    def __init__(self, update, start=0.0, resets=True, **options):
        super().__init__(name="own", dtype=options.get("dtype"))
        variable = dict(initializer=keras.initializers.Constant(start), **options)
        self.one, self.other = (self.add_variable((), name=name, **variable) for name in ("one", "other"))
        self.update, self.start, self.resets = update, start, resets

    def update_state(self, y, prediction, sample_weight=None):
        for variable, value in zip((self.one, self.other), self.update(self.one, self.other, prediction), strict=True):
            variable.assign(ops.cast(value, variable.dtype))

    def reset_state(self):
        for variable in (self.one, self.other) if self.resets else ():
            variable.assign(ops.cast(self.start, variable.dtype))

    def result(self):
        return self.one


class Merging(Own):
    def merge_state(self, metrics):
        pass


def maximum(one, other, value):
    return ops.maximum(one, ops.max(value)), other


def rows(value):
    return ops.cast(ops.shape(value)[0], "float32")


ADDING = {
    "sums": Own(lambda one, other, value: (one + ops.sum(value), other + rows(value))),
    "counts": Own(lambda one, other, value: (one + ops.cast(rows(value), "int32"), other + 1), dtype="int32"),
    "nothing": Own(lambda one, other, value: (one, other), start=0.5),
    "half precision": Own(
        lambda one, other, value: (one + ops.cast(ops.sum(value), "float16"), other), dtype="float16"
    ),
    "bfloat16": Own(lambda one, other, value: (one + ops.cast(ops.sum(value), "bfloat16"), other), dtype="bfloat16"),
    "a flag that stands": Own(lambda one, other, value: (one, other), dtype="bool"),
    "not a number": Own(lambda one, other, value: (one + ops.sum(value) * np.nan, other)),
    "a maximum that is merged": Merging(maximum),
    "a mean over workers": Own(lambda one, other, value: (0.9 * one + ops.sum(value), other), aggregation="mean"),
}
OTHERS = {
    "maximum": (maximum, "'one'"),
    "maximum of what is below the start": (lambda one, other, value: (ops.maximum(one, -9.0), other), "'one'"),
    "minimum": (lambda one, other, value: (one, ops.minimum(other, ops.min(value))), "'other'"),
    "last": (lambda one, other, value: (one, ops.mean(value)), "'other'"),
    "moving average": (lambda one, other, value: (0.99 * one + 0.01 * ops.sum(value), other), "'one'"),
    "running mean": (lambda one, other, value: (one + (ops.mean(value) - one) / (other + 1), other + 1), "'one'"),
    "product": (lambda one, other, value: (one, (other + 1) * 2), "'other'"),
}


@pytest.fixture
def compiled():
    def make(*metrics, kind=keras.Sequential, **options):
        keras.utils.set_random_seed(1)
        model = kind([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)], **options)
        model.compile("adam", "mse", metrics=list(metrics))
        model.test_on_batch(X, Y)
        model.reset_metrics()
        return model

    return make


@pytest.mark.parametrize("metric", ADDING.values(), ids=list(ADDING))
def test_what_adds_up_or_is_merged_passes(compiled, metric):
    assert check_metrics(compiled(metric, "mae"), (X, Y)) == []


@pytest.mark.feature(
    "Metrics whose variables cannot be added (maximum, moving average)",
    area="Losses and metrics",
    status="refused",
    note="add `merge_state`",
)
@pytest.mark.parametrize(("update", "variable"), OTHERS.values(), ids=list(OTHERS))
def test_what_does_not_add_up_is_refused_by_name_with_the_remedy(compiled, update, variable):
    with pytest.raises(CaptureError, match=f"'own'.*variable {variable}.*merge_state"):
        check_metrics(compiled(Own(update)), (X, Y))


@pytest.mark.parametrize("start", [-np.inf, -1e6])
def test_a_maximum_that_starts_low_is_refused(compiled, start):
    with pytest.raises(CaptureError, match="merge_state"):
        check_metrics(compiled(Own(maximum, start=start)), (X, Y))


def test_what_is_kept_over_a_reset_is_refused(compiled):
    keeping = Own(lambda one, other, value: (one + 1.0, other), resets=False)
    with pytest.raises(CaptureError, match=r"reset_state\(\) leaves something in its variable 'one'"):
        check_metrics(compiled(keeping), (X, Y))


class OwnSteps(keras.Sequential):
    """Model with its own logs and a metric that only ``train_step`` updates, in a function that TensorFlow traces."""

    def __init__(self, layers, update=maximum):
        super().__init__(layers)
        self.own = Own(update)

    def train_step(self, data):
        import tensorflow as tf

        self.layers[0].kernel.assign_add(ops.ones((3, 1)))
        tf.function(lambda x: self.own.update_state(None, self(x, training=True)))(data[0])
        return super().train_step(data)

    def test_step(self, data):
        return {**super().test_step(data), "nested": {"more": ops.ones(2)}}


def test_metrics_of_the_models_own_steps_are_looked_at(compiled):
    with pytest.raises(CaptureError, match="'own'"):
        check_metrics(compiled(kind=OwnSteps), (X, Y))


def test_logs_that_are_no_results_of_metrics_are_named(compiled):
    model = compiled(kind=OwnSteps, update=lambda one, other, value: (one + 1.0, other))
    assert check_metrics(model, (X, Y)) == []
    assert check_metrics(model, (X, Y), (X, Y)) == ["more"]
    assert check_metrics(compiled("mae"), (X, Y), (X, Y)) == []


def test_nothing_is_left_of_looking(compiled):
    model = compiled(kind=OwnSteps, update=lambda one, other, value: (one + 1.0, other))
    before = [np.array(v) for v in (*model.variables, *model.metrics_variables)]
    check_metrics(model, (X, Y), (X, Y))
    after = [np.array(v) for v in (*model.variables, *model.metrics_variables)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "update_state" not in vars(model.own)
    assert "apply" not in vars(model.optimizer)
    assert model.optimizer.iterations == 0


class OwnF1(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.f1 = keras.metrics.F1Score(average="micro")

    def train_step(self, data):
        self.f1.update_state(data[1], self(data[0]))
        return super().train_step(data)


def test_a_metric_that_its_first_update_builds_is_built_with_the_model():
    model = OwnF1([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    build_model(model, (X, Y))
    assert len(model.f1.variables) == 4
    assert model.get_metrics_result()["f1_score"] == 0.0
    assert not model.optimizer.built
