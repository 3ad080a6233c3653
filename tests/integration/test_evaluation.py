"""Evaluation and prediction on a cluster of threads, compared with plain Keras."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.core.specs.job import JobSpec, resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from nfdt.model.training.metrics import ModelMetrics
from nfdt.model.training.predict import join_outputs, load_outputs
from nfdt.worker import worker
from tests.support.local_cluster import train

pytestmark = pytest.mark.processes

FLAT = [name for name in PRESETS if resolve_algorithm(name).topology_facts.flat]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(203, 6)).astype("float32")
Y = RNG.integers(0, 2, size=(203, 1)).astype("float32")
WEIGHTS = RNG.uniform(size=203).astype("float32")
BATCH = 16  # the last batch is partial


@pytest.fixture(scope="module")
def classifier():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1, "sigmoid")])
    model.compile(
        "adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")], weighted_metrics=["mse"]
    )
    model.fit(X, Y, epochs=1, verbose=0)  # statistics of its own
    return model


@pytest.fixture(scope="module")
def expected(classifier):
    return classifier.evaluate(X, Y, sample_weight=WEIGHTS, batch_size=BATCH, verbose=0, return_dict=True)


@pytest.fixture(scope="module")
def several_outputs():
    keras.utils.set_random_seed(6)
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((1,), name="b")}
    both = keras.layers.Dense(5, "relu")(keras.layers.concatenate(list(inputs.values())))
    outputs = {"wide": keras.layers.Dense(3)(both), "one": [keras.layers.Dense(1)(both), both > 0]}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss={"wide": "mse", "one": [None, None]})
    return model


def logs(model, outcome):
    metrics = ModelMetrics(model)
    metrics.load(outcome.answer)
    return {name: float(value) for name, value in model.get_metrics_result().items()}


@pytest.fixture(scope="module")
def evaluate(classifier):
    """Return a function that evaluates the classifier, in models that the first call has built."""
    built = {}

    def run(**options):
        options = {"algorithm": "ddc-asgd", "kept": built, **options}
        return train(classifier, (X, Y, WEIGHTS), method="evaluate", batch_size=BATCH, **options)

    return run


@pytest.mark.feature("`evaluate` on workers", area="Fit, evaluate and predict")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_metrics_are_those_of_keras(classifier, expected, evaluate, workers):
    outcome = evaluate(workers=workers)
    assert logs(classifier, outcome) == pytest.approx(expected, rel=1e-5)
    assert [(event["steps"], event["samples"]) for event in outcome.epochs] == [(0, 0)]


def test_batches_of_a_killed_worker_are_evaluated_again(classifier, expected, evaluate):
    outcome = evaluate(workers=2, lose=("worker-0", 1))
    lost = [data for kind, data in outcome.events if kind == "worker_lost"]
    assert [data["requeued"] for data in lost] == [1]
    assert logs(classifier, outcome) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[] if name in ("bsp", "h-ps", "local-ddc") else pytest.mark.long) for name in FLAT],
)
def test_every_algorithm_evaluates(classifier, expected, evaluate, algorithm):
    outcome = evaluate(workers=2, algorithm=algorithm)
    assert logs(classifier, outcome) == pytest.approx(expected, rel=1e-5)


def test_batch_sizes_of_training_do_not_bind_an_evaluation(classifier, expected, evaluate):
    outcome = evaluate(algorithm="dbs-sgd", overrides={"batch_min": 24, "batch_multiple": 24})
    assert logs(classifier, outcome) == pytest.approx(expected, rel=1e-5)


@pytest.mark.feature("`predict` on workers", area="Fit, evaluate and predict")
@pytest.mark.parametrize("most", [1, 2**20])
def test_predictions_are_those_of_keras_bit_by_bit(several_outputs, monkeypatch, most):
    monkeypatch.setattr(worker, "OUTPUT_BYTES", most)
    data = ({"a": X, "b": Y},)
    outcome = train(several_outputs, data, algorithm="bsp", workers=2, method="predict", batch_size=BATCH)
    names = outcome.answer.decode().split()
    leaves = join_outputs((load_outputs(outcome.artifacts[name]) for name in names), range(0, len(X), BATCH))
    plain = keras.tree.flatten(several_outputs.predict(data[0], batch_size=BATCH, verbose=0))
    assert len(names) == 13 if most == 1 else len(names) < 13
    assert [leaf.dtype for leaf in leaves] == [leaf.dtype for leaf in plain]
    for mine, other in zip(leaves, plain, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_program_that_was_trained_predicts_and_evaluates_with_the_built_model(classifier, expected, evaluate):
    kept = {}
    train(classifier, X, Y, algorithm="bsp", batch_size=32, kept=kept)
    first = kept["worker-0"]
    train(classifier, (X,), algorithm="bsp", method="predict", batch_size=32, kept=kept)
    outcome = evaluate(algorithm="bsp", kept=kept)
    assert kept["worker-0"].model is first.model
    assert logs(classifier, outcome) == pytest.approx(expected, rel=1e-5)


def test_a_program_that_only_predicts_is_built_anew_to_evaluate(classifier, expected, evaluate):
    kept = {}
    train(classifier, (X,), algorithm="bsp", method="predict", batch_size=32, kept=kept)
    first = kept["worker-0"]
    outcome = evaluate(algorithm="bsp", kept=kept)
    assert kept["worker-0"].model is not first.model
    assert logs(classifier, outcome) == pytest.approx(expected, rel=1e-5)


def test_a_specification_of_an_evaluation_is_checked():
    fields = {"program": "0" * 64, "fit": {"epochs": 1}, "train": {"kind": "arrays", "samples": 3}}
    with pytest.raises(ValueError, match="independent workers"):
        JobSpec(algorithm=resolve_algorithm("allreduce"), method="evaluate", **fields)
    with pytest.raises(ValueError, match="batch_min"):
        JobSpec(algorithm=resolve_algorithm("dbs-sgd", batch_min=64), **fields)
