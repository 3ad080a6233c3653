"""Models without a loss in ``compile``, without ``call``, without trainable weights, or with other than dense inputs.

They train as in plain Keras.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from pathlib import Path

import keras
import numpy as np
import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from tests.support import unusual_models
from tests.support.local_cluster import flat, train
from tests.support.scripts import answer
from tests.support.unusual_models import ROWS, TARGETS

pytestmark = pytest.mark.processes

FLAT = [name for name in PRESETS if resolve_algorithm(name).topology_facts.flat]
BATCH, WORKERS = 16, 2


def make(name):
    keras.utils.set_random_seed(7)
    return getattr(unusual_models, name)()


def compare(name, algorithm, workers, y=None, validates=False):
    """Train on a cluster and in plain Keras with the same global batch, and require the same weights and logs."""
    plain = make(name)
    validation = (ROWS[:20], y[:20]) if validates else None
    history = plain.fit(
        ROWS, y, batch_size=BATCH * workers, epochs=2, shuffle=False, verbose=0, validation_data=validation
    )
    outcome = train(
        make(name), ROWS, y, algorithm=algorithm, workers=workers, batch_size=BATCH, epochs=2, validation=validation
    )
    if plain.trainable_variables:
        np.testing.assert_allclose(outcome.weights, flat(plain), rtol=2e-4, atol=2e-5)
    for epoch, event in enumerate(outcome.epochs):
        logs = {**event["logs"], **{f"val_{name}": value for name, value in (event["val_logs"] or {}).items()}}
        assert set(logs) == set(history.history)
        for log, values in history.history.items():
            assert logs[log] == pytest.approx(values[epoch], rel=1e-4), (log, epoch)
    assert int(outcome.optimizer[0]) == int(plain.optimizer.iterations)
    return plain, outcome


@pytest.mark.feature("Losses only from `add_loss` and regularizers", area="Models")
@pytest.mark.parametrize(("algorithm", "workers"), [("bsp", 2), ("ddc-asgd", 1)])
@pytest.mark.parametrize("name", ["endpoint", "weight_penalty"])
def test_a_loss_only_from_layers_trains(name, algorithm, workers):
    compare(name, algorithm, workers)


@pytest.mark.feature("Models without `call`", area="Models")
@pytest.mark.parametrize(
    ("name", "algorithm", "workers"), [("autoencoder", "bsp", 2), ("variational", "bsp", 1), ("variational", "asgd", 1)]
)
def test_a_model_without_call_trains(name, algorithm, workers):
    compare(name, algorithm, workers)


@pytest.mark.feature("Models without trainable weights", area="Models")
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("algorithm", FLAT)
def test_a_model_without_trainable_weights_counts(algorithm):
    plain, outcome = compare("frozen", algorithm, 1, TARGETS, validates=True)
    local = resolve_algorithm(algorithm).exchange_facts.local  # the optimizer steps on the worker, which has its state
    own = plain.optimizer.variables if local else []
    for merged, variable in zip(outcome.untrained, [*plain.non_trainable_variables, *own], strict=True):
        np.testing.assert_allclose(merged, np.asarray(variable), rtol=1e-3, atol=1e-6)
    assert not np.allclose(outcome.untrained[0], 0), "the moving mean moved"


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_workers_share_the_metrics_of_a_model_without_trainable_weights():
    compare("normalization", "bsp", 2, ROWS, validates=True)


SCRIPT = (
    Path(unusual_models.__file__).read_text(encoding="utf-8")
    + """
import json, warnings
import nfdt

def rows(y):
    return lambda batch: dict(x=ROWS, y=y, batch_size=batch)

def sentences_of(batch):
    return dict(x=tf.data.Dataset.from_tensor_slices((sentences(), TARGETS)).batch(batch))

CASES = dict(
    endpoint=(endpoint, rows(None)),
    autoencoder=(autoencoder, rows(None)),
    normalization=(normalization, rows(ROWS)),
    sparse=(of_sparse_rows, lambda batch: dict(x=sparse_rows(), y=TARGETS, batch_size=batch)),
    ragged=(of_sentences, sentences_of),
)

def fit(make, data, batch):
    keras.utils.set_random_seed(7)
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(**data(batch), epochs=2, shuffle=False, verbose=0)
    said = any("does not have any trainable weights" in str(one.message) for one in caught)
    return model, history.history, said, int(model.optimizer.iterations)

found = {}
with nfdt.session(**OPTIONS):
    trained = {name: fit(*case, BATCH) for name, case in CASES.items()}
for name, case in CASES.items():
    model, history, *others = trained[name]
    plain, expected, *expected_others = fit(*case, GLOBAL)
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    found[name] = dict(
        weights=max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0),
        logs=max(abs(a - b) for key in expected for a, b in zip(expected[key], history[key], strict=True)),
        same=others == expected_others and list(history) == list(expected),
    )
print(json.dumps(found))
"""
)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "bsp"},
        pytest.param({"algorithm": "allreduce"}, marks=pytest.mark.horovod),
    ],
    ids=lambda options: options["algorithm"],
)
def test_scripts_with_such_models_train_on_processes_as_in_plain_keras(run_script, options):
    source = SCRIPT.replace("OPTIONS", repr({**options, "workers": WORKERS})).replace("GLOBAL", str(WORKERS * BATCH))
    for name, case in answer(run_script(source.replace("BATCH", str(BATCH)))).items():
        assert case["weights"] < 2e-5, name
        assert case["logs"] < 2e-5, name
        assert case["same"], name
