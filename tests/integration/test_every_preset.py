"""Every preset on real, unequal processes: as accurate as one process, and each sample is trained once."""

from __future__ import annotations

import json

import pytest

from nfdt.core.specs.presets import PRESETS
from tests.support.scripts import start_server, stop

EPOCHS, BATCH, ROWS = 10, 16, 1408
BATCHES_PER_UPDATE = {"bsp": 4, "allreduce": 4, "n-softsync": 4, "group-sync": 2}
POINTS = 4.0  # of 389 test rows, in tens of epochs; see docs/benchmarks.md for longer training
DEADLINE_S = 500
pytestmark = [pytest.mark.timeout(DEADLINE_S + 60), pytest.mark.long, pytest.mark.processes]

SCRIPT = f"""
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, nfdt
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train, test = (x[:{ROWS}], y[:{ROWS}]), (x[{ROWS}:], y[{ROWS}:])

def fit(batch_size):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(*train, batch_size=batch_size, epochs={EPOCHS}, verbose=0)
    return history, 100 * model.evaluate(*test, verbose=0)[1]

found = {{str(merged): dict(accuracy=fit(merged * {BATCH})[1]) for merged in (1, 2, 4)}}
for name in {list(PRESETS)}:
    emulate = {{"step_ms": [3, 3, 12, 12]}}
    if name in ("asgd", "group-sync"):
        emulate["fail"] = "3@20"
    groups = dict(groups="0,1;2,3") if name == "group-sync" else {{}}
    with nfdt.session(algorithm=name, workers=4, emulate=emulate, **groups):
        history, accuracy = fit({BATCH})
    samples = [row.get("samples", 0) for row in history.nfdt.values()]
    found[name] = dict(accuracy=accuracy, epochs=len(history.history["loss"]), samples=samples)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory, script_fork_server):
    directory = tmp_path_factory.mktemp("presets")
    cluster = start_server(directory, "--workers", "4")
    script = directory / "script.py"
    script.write_text(SCRIPT)
    try:
        done = script_fork_server.run(script, **cluster.env())
    finally:
        stop(cluster.process)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.feature("Every preset, on workers of unequal speed", area="Algorithms")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_on_unequal_workers_as_well_as_one_process(found, preset):
    plain = found[str(BATCHES_PER_UPDATE.get(preset, 1))]["accuracy"]
    assert found[preset]["epochs"] == EPOCHS
    assert found[preset]["accuracy"] > plain - POINTS


@pytest.mark.parametrize("preset", PRESETS)
def test_every_sample_is_trained_once_per_epoch_for_any_lost_worker(found, preset):
    assert sum(found[preset]["samples"]) == EPOCHS * ROWS
