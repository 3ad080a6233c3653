"""Equality of metrics counted by workers and by Keras on one machine."""

import keras
import numpy as np
import pytest
from keras import metrics as km
from keras import ops

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.errors import CaptureError, ShapeMismatch
from nfdt.model.backends.tensorflow_step import step_logs
from nfdt.model.training.metric_states import merge_metric_states, numbers
from nfdt.model.training.metrics import ModelMetrics
from nfdt.model.training.steps import evaluation_step

ROWS, CLASSES, BATCH = 70, 4, 8


class Extremes(km.Metric):
    """Metric with two results, from variables that cannot be added."""

    def __init__(self, name="extremes", **options):
        super().__init__(name=name, **options)
        self.least = self.add_weight(name="least", initializer="zeros")
        self.inner = [self.add_weight(name="greatest", initializer="zeros")]

    def update_state(self, y, prediction, sample_weight=None):
        self.least.assign(ops.minimum(self.least, -ops.max(prediction)))
        self.inner[0].assign(ops.maximum(self.inner[0], ops.max(prediction)))

    def result(self):
        return {"least": self.least, "greatest": self.inner[0]}

    def merge_state(self, metrics):
        for other in metrics:
            self.least.assign(ops.minimum(self.least, other.least))
            self.inner[0].assign(ops.maximum(self.inner[0], other.inner[0]))


class Averaged(km.Metric):
    """Metric with the mean of the steps' means, times a threshold that does not start at zero."""

    def __init__(self, name="averaged", **options):
        super().__init__(name=name, **options)
        self.average = self.add_variable((), "zeros", aggregation="mean", name="average")
        self.steps = self.add_variable((), "zeros", dtype="int32", name="steps")
        self.threshold = self.add_variable((), "ones", name="threshold")
        self.seen = self.add_variable((), "zeros", dtype="bool", name="seen")

    def update_state(self, y, prediction, sample_weight=None):
        self.steps.assign_add(1)
        self.seen.assign(True)
        value = ops.mean(prediction) * self.threshold
        self.average.assign_add((value - self.average) / ops.cast(self.steps, "float32"))

    def reset_state(self):
        super().reset_state()
        self.threshold.assign(1.0)

    def result(self):
        return self.average * ops.cast(self.seen, "float32")


def all_kinds():
    return [
        km.F1Score(name="f1"),
        km.F1Score(average="macro", name="f1_macro"),
        km.FBetaScore(beta=2.0, average="micro", name="f2"),
        km.R2Score(name="r2"),
        km.R2Score(class_aggregation=None, name="r2_each"),
        km.Precision(thresholds=[0.3, 0.5], name="precisions"),
        km.Recall(class_id=1),
        km.AUC(),
        km.AUC(multi_label=True),
        km.PrecisionAtRecall(0.4),
        km.SensitivityAtSpecificity(0.4),
        km.TruePositives(),
        km.FalseNegatives(thresholds=[0.2, 0.4]),
        km.OneHotMeanIoU(CLASSES),
        km.OneHotIoU(CLASSES, [0, 2]),
        km.TopKCategoricalAccuracy(2),
        "accuracy",
        km.RootMeanSquaredError(),
        km.CosineSimilarity(),
        km.KLDivergence(),
        km.PearsonCorrelation(),
        km.ConcordanceCorrelation(),
        Extremes(),
        Averaged(),
    ]


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    x, labels = draw.normal(size=(ROWS, 3)).astype("f4"), draw.integers(0, CLASSES, ROWS)
    return x, np.eye(CLASSES, dtype="f4")[labels], draw.uniform(0.5, 2.0, ROWS).astype("f4")


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES, "softmax")])
    made.compile("sgd", "categorical_crossentropy", metrics=all_kinds(), weighted_metrics=["mae"])
    made.test_on_batch(np.zeros((BATCH, 3)), np.zeros((BATCH, CLASSES)))
    return made


def batches(data, rows):
    return [tuple(array[i : i + BATCH] for array in data) for i in range(rows.start, rows.stop, BATCH)]


@pytest.fixture(scope="module")
def evaluated(model, data):
    """Collect the counts of a worker on each of some slices of rows."""
    layout = ParameterLayout.of([(v.path, tuple(v.shape)) for v in model.trainable_variables])
    step, weights = evaluation_step(model, layout), layout.flatten([v.numpy() for v in model.trainable_variables])

    def collect(slices):
        worker, states = ModelMetrics(model), []
        for rows in slices:
            worker.reset()
            for batch in batches(data, rows):
                step(weights, batch)
                worker.stepped(len(batch[0]))
            states.append(worker.collect())
        return states

    return collect


@pytest.mark.processes
@pytest.mark.feature(
    "Accuracy, mean and error metrics",
    "AUC, precision, recall and confusion counts",
    "F1, R2 and other metrics whose result is an array",
    "IoU metrics",
    "Metrics of the script with `merge_state` or mean aggregation",
    "`weighted_metrics`",
    area="Losses and metrics",
)
@pytest.mark.parametrize("cuts", [[], [32], [16, 56], [8, 16, 64]], ids=lambda cuts: f"{len(cuts) + 1} workers")
def test_any_number_of_workers_evaluates_to_what_keras_does(model, data, evaluated, cuts):
    x, y, weights = data
    expected = model.evaluate(x, y, batch_size=BATCH, sample_weight=weights, verbose=0, return_dict=True)
    slices = [slice(*ends) for ends in zip([0, *cuts], [*cuts, ROWS], strict=True)]
    logs = ModelMetrics(model).logs(merge_metric_states(evaluated(slices)), {})
    assert len(logs) == len(all_kinds()) + 3
    assert logs.keys() == expected.keys()
    for name, value in logs.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert np.shape(logs["f1"]) == np.shape(logs["r2_each"]) == (CLASSES,)
    assert np.shape(logs["precisions"]) == (2,)
    assert isinstance(logs["greatest"], float)


def test_a_metric_of_one_class_is_an_array_of_one_number_as_in_keras():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "mse", metrics=[km.F1Score(threshold=0.5, name="f1"), "mae"])
    x, y = np.ones((BATCH, 2)), np.ones((BATCH, 1))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    worker = ModelMetrics(model)
    worker.reset()
    logs = model.test_step((x, y))
    worker.stepped(BATCH, step_logs(logs, "test_step"))
    found = worker.logs(worker.collect(), {})
    assert {name: np.shape(value) for name, value in found.items()} == {
        name: np.shape(value) for name, value in expected.items()
    }
    np.testing.assert_allclose(found["f1"], expected["f1"])
    running = numbers(step_logs(logs, "test_step"))
    assert running.keys() == expected.keys()
    assert all(isinstance(value, float) for value in running.values())


def test_counting_goes_on_where_it_was_collected_or_loaded(model, evaluated, data):
    worker = ModelMetrics(model)
    (whole,) = evaluated([slice(0, 32)])
    parts = evaluated([slice(0, 16), slice(16, 32)])
    worker.load(parts[0])
    assert worker.collect() == worker.collect() == parts[0]
    for batch in batches(data, slice(16, 32)):
        model.test_step(batch)
        worker.stepped(BATCH)
    one, other = (ModelMetrics(model).logs(state, {}) for state in (worker.collect(), whole))
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.fixture
def small():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.test_on_batch(np.zeros((1, 1)), np.zeros((1, 1)))
    return model


def counted(model, steps):
    """Return the state of a worker after steps with these (samples, logs), which moved only the loss."""
    worker = ModelMetrics(model)
    worker.reset()
    for samples, logs in steps:
        model.metrics[0].update_state(samples, sample_weight=samples)
        worker.stepped(samples, logs)
    return worker.collect()


def test_a_steps_own_logs_are_there_the_last_of_each_worker_by_samples(small):
    states = [
        counted(
            small,
            [(8, {"loss": 7.0, "mae": 3.0, "own": [9.0, 9.0]}), (4, {"loss": 1.0, "mae": 2.0, "own": [1.0, 2.0]})],
        ),
        counted(small, [(24, {"loss": 1.0, "mae": 5.0, "own": [4.0, 5.0]})]),
    ]
    logs = ModelMetrics(small).logs(merge_metric_states(states), {})
    assert logs == {"loss": pytest.approx((64 + 16 + 576) / 36), "mae": pytest.approx(4.0), "own": [3.0, 4.0]}


def test_as_in_keras_results_of_metrics_replace_logs_of_a_step_with_the_same_names(small):
    state = counted(small, [(8, {"loss": 1.0, "mae": 3.0})])
    assert ModelMetrics(small).logs(state, {}) == {"loss": 8.0, "mae": 0.0}


def test_without_any_state_the_running_logs_are_used(small):
    assert ModelMetrics(small).logs(b"", {"loss": 2.0}) == {"loss": 2.0}
    assert ModelMetrics(small).summary(b"", b"", {"loss": 2.0}) == {"logs": {"loss": 2.0}, "val_logs": None}


def test_a_state_of_another_model_is_refused(small, evaluated):
    with pytest.raises(ShapeMismatch, match="another model"):
        ModelMetrics(small).load(evaluated([slice(0, 8)])[0])


def test_a_result_that_is_no_number_is_refused_by_name(small):
    class Text(km.Mean):
        def result(self):
            return "much"

    small.extra = Text(name="how_much")
    with pytest.raises(CaptureError, match="'how_much'.*much"):
        ModelMetrics(small).logs(counted(small, [(8, None)]), {})


def test_metrics_that_are_set_aside_lack_what_is_counted_meanwhile(evaluated, model, data):
    """Also metrics whose variables appear with their first update."""
    (whole,) = evaluated([slice(0, 2 * BATCH)])
    fresh = keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES, "softmax")])
    fresh.set_weights(model.get_weights())
    fresh.compile("sgd", "categorical_crossentropy", metrics=all_kinds(), weighted_metrics=["mae"])
    worker, parts = ModelMetrics(fresh), []

    def count(rows):
        for x, y, weight in batches(data, rows):
            fresh.test_on_batch(x, y, weight, return_dict=True)
            worker.stepped(len(x))

    worker.reset()
    for first in (slice(0, 0), slice(0, BATCH)):
        count(first)
        held = worker.set_aside()
        count(slice(BATCH, 2 * BATCH))
        parts.append(worker.collect())
        worker.take_back(held)
    expected = ModelMetrics(model).logs(whole, {})
    logs = ModelMetrics(model).logs(merge_metric_states([worker.collect(), parts[1]]), {})
    assert logs.keys() == expected.keys()
    for name, value in logs.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert load_arrays(parts[0])["steps"] == load_arrays(parts[1])["steps"] == 1
