"""Metrics in every form that ``compile`` takes: their names, order and values are those of Keras alone."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
from keras import metrics as km

from tests.support.simulated_jobs import cluster, simulate

pytestmark = pytest.mark.processes

ROWS, CLASSES = 12, 3
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)).astype("float32")
LABELS = DRAW.integers(0, CLASSES, ROWS)
RATED = DRAW.integers(0, 2, (ROWS, 1)).astype("float32")

ONE = {
    "names": {"metrics": ["accuracy", "acc", "mae", "MeanSquaredError", "F1Score", "AUC", "TrueNegatives", "poisson"]},
    "many": {"metrics": [*(partial(km.AUC, name=f"auc_{i}") for i in range(20)), *("Precision", "Recall")]},
    "nested, twice and weighted": {"metrics": [["mae", "mae"], ["mse"]], "weighted_metrics": ["mae", "accuracy"]},
    "losses": {"metrics": [keras.losses.mean_squared_error], "weighted_metrics": {"dense": "mae"}},
}
TWO = {
    "lists": {
        "metrics": [["mae", partial(km.AUC, name="auc")], ["accuracy"]],
        "weighted_metrics": [None, ["accuracy"]],
    },
    "a name for each": {"metrics": ["mae", "accuracy"]},
    "none for one": {"metrics": [None, ["accuracy"]], "weighted_metrics": [[], ["accuracy"]]},
    "dictionary": {"metrics": {"b": ["accuracy"], "a": "mae"}, "weighted_metrics": {"a": ["mae", "mse"]}},
    "tuples": {"metrics": (("mae", "mse"), ("accuracy",))},
}


def one():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES, "softmax", name="dense")])


def two():
    inputs = keras.Input((3,))
    outputs = [keras.layers.Dense(1, "sigmoid", name="a")(inputs), keras.layers.Dense(3, "softmax", name="b")(inputs)]
    return keras.Model(inputs, outputs)


def compiled(make, losses, forms):
    keras.utils.set_random_seed(1)
    model = make()
    made = keras.tree.map_structure(lambda form: form() if isinstance(form, partial) else form, forms)
    model.compile(keras.optimizers.SGD(0.01), losses, **made)
    return model


@pytest.mark.parametrize(
    ("make", "y", "losses", "forms"),
    [(one, np.eye(CLASSES)[LABELS], "categorical_crossentropy", forms) for forms in ONE.values()]
    + [(two, [RATED, LABELS], ["mse", "sparse_categorical_crossentropy"], forms) for forms in TWO.values()],
    ids=[*ONE, *TWO],
)
def test_the_history_is_that_of_keras(make, y, losses, forms):
    options = {"batch_size": 6, "shuffle": False, "validation_data": (X, y)}
    expected = compiled(make, losses, forms).fit(X, y, verbose=0, **options).history
    model = compiled(make, losses, forms)
    _, _, distributed = simulate(cluster({}), "asgd", model=model, x=X, y=y, **options)
    assert list(distributed.history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(distributed.history[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
