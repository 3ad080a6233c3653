"""Tables that shards make: trained as in one process, with no memory for them in the script, from fit to fit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.scripts import answer, start_server, stop

pytestmark = pytest.mark.processes

MODEL = """
import json
import resource
import keras
import nfdt
import numpy as np

keras.utils.set_random_seed(1)
rng = np.random.default_rng(2)

def data(rows):
    x = rng.integers(0, rows, (800, 4)).astype("int32")
    return x, (x.sum(1) % 2).astype("float32")

def build(rows, here=False, optimizer=None):
    keras.utils.set_random_seed(3)
    layer = nfdt.Embedding(rows, 16, name="items")
    if here:
        layer.make_rows()
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model

def fit(model, x, y, callbacks=()):
    options = {"batch_size": 40, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [*callbacks]}
    return model.fit(x, y, validation_data=(x[:40], y[:40]), **options).history

class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[-1].kernel.assign(self.model.layers[-1].kernel * 0.5)

def run(model, x, y):
    found = [fit(model, x, y), model.evaluate(x, y, verbose=0), model.predict(x, verbose=0).tolist()]
    found.append(fit(model, x, y, [Halve()]))
    return [*found, model.layers[-1].kernel.numpy().tolist()]

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
"""

TRAINED = (
    MODEL
    + """
found = {}
x, y = data(20_000)
for name, optimizer in (("sgd", keras.optimizers.SGD), ("adagrad", keras.optimizers.Adagrad)):
    here, there = build(20_000, True, optimizer(0.5)), build(20_000, optimizer=optimizer(0.5))
    wanted = run(here, x, y)
    with nfdt.session(workers=1, shards=2, algorithm="asgd"):
        found[name] = [wanted, run(there, x, y)]

def error_of(call):
    try:
        call()
    except nfdt.errors.UsageError as error:
        return str(error)

with nfdt.session(workers=1):
    found["other server"] = error_of(lambda: fit(there, x, y))
    there.stop_training = True
    model = build(20_000, optimizer=keras.optimizers.Adam())
    found["adam"] = error_of(lambda: fit(model, x, y))
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    found["callback"] = error_of(lambda: build(20_000).fit(x, y, callbacks=[stopping], verbose=0))
    found["generator"] = error_of(lambda: there.evaluate(zip([x], [y]), verbose=0))
print(json.dumps(found))
"""
)

SAVED = (
    MODEL
    + """
import sys
folder = sys.argv[1]
x, y = data(20_000)
model, losses = build(20_000, optimizer=keras.optimizers.Adagrad(0.5)), []
with nfdt.session(workers=1, shards=2, algorithm="asgd"):
    fit(model, x, y)
    nfdt.save_tables(model, folder + "/tables", file_mb=0.5)
    model.save(folder + "/model.keras")
    losses.append(model.evaluate(x, y, verbose=0)[0])
    losses.append(fit(model, x, y)["loss"])
again = build(20_000, optimizer=keras.optimizers.Adagrad(0.5))
again.load_weights(folder + "/model.keras")
with nfdt.session(workers=1, shards=3, algorithm="asgd"):
    nfdt.load_tables(again, folder + "/tables")
    nfdt.save_tables(again, folder + "/again", file_mb=0.5)
    losses.append(again.evaluate(x, y, verbose=0)[0])
    losses.append(fit(again, x, y)["loss"])
here = build(20_000, here=True)
here.load_weights(folder + "/model.keras")
nfdt.load_tables(here, folder + "/tables")
losses.append(here.evaluate(x, y, verbose=0)[0])
try:
    nfdt.save_tables(again, folder + "/late")
except nfdt.errors.UsageError as error:
    print(json.dumps([losses, str(error)]))
"""
)

NAMED = (
    MODEL
    + """
import sys
job, fails_after = sys.argv[1], int(sys.argv[2])

class Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == fails_after:
            raise RuntimeError("interrupted")

x, y = data(20_000)
model = build(20_000, optimizer=keras.optimizers.Adagrad(0.5))
with nfdt.session(workers=1, shards=2, algorithm="asgd", job=job):
    history = model.fit(x, y, batch_size=40, epochs=4, shuffle=False, verbose=0, callbacks=[Interrupt()])
    print(json.dumps([history.history["loss"], model.evaluate(x, y, verbose=0)[0]]))
"""
)

LARGE = (
    MODEL
    + """
ROWS = 8_000_000  # 512 MB
x, y = data(ROWS)
model, before = build(ROWS), peak_mb()
with nfdt.session(workers=2, shards=2):
    history, loss = fit(model, x, y), model.evaluate(x, y, verbose=0)[0]
print(json.dumps({"history": history, "loss": loss, "grown": peak_mb() - before, "mb": model.count_params() / 2**18}))
"""
)


@pytest.mark.feature("Embeddings larger than the script's memory", area="Models")
def test_a_script_trains_as_with_tables_of_its_own(run_script):
    done = run_script(TRAINED)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for name in ("sgd", "adagrad"):
        first, _, _, second, _ = found[name][0]
        assert second["loss"][-1] < first["loss"][0]
    assert_same(*found["sgd"], rel=1e-6)
    assert_same(*found["adagrad"], rel=1e-4)
    wanted, received = found["sgd"]
    np.testing.assert_allclose(received[2], wanted[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(received[4], wanted[4], rtol=1e-5, atol=1e-7)
    assert "nfdt.load_tables" in found["other server"]
    assert "Adagrad" in found["adam"]
    assert "restore_best_weights" in found["callback"]
    assert "data are not arrays" in found["generator"]


def test_tables_are_written_to_files_and_read_in_another_session_or_here(run_script, tmp_path):
    done = run_script(SAVED, str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    (trained, onward, loaded, onward_again, here), error = json.loads(done.stdout.strip().splitlines()[-1])
    assert loaded == pytest.approx(trained, rel=1e-6)
    assert here == pytest.approx(trained, rel=1e-5)
    assert onward_again == pytest.approx(onward, rel=1e-3), "the optimizer of the other layers is a new one"
    assert "ends with it" in error
    index = json.loads((tmp_path / "tables" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["tables"] == {"items": [20_000, 16, 2]}
    files = sorted((tmp_path / "tables").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) == 5
    assert max(file.stat().st_size for file in files) < 0.51 * 2**20
    for file in files:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), "with the sums of squares"


def assert_same(one, other, rel):
    assert one[1] == pytest.approx(other[1], rel=rel)
    for mine, theirs in zip((one[0], one[3]), (other[0], other[3]), strict=True):
        for name, values in mine.items():
            assert theirs[name] == pytest.approx(values, rel=rel), name


def test_a_table_larger_than_what_the_script_allocates(run_script):
    done = run_script(LARGE)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["mb"] > 480
    assert found["grown"] < 200
    assert found["history"]["loss"][1] < found["history"]["loss"][0]
    assert found["loss"] == pytest.approx(found["history"]["val_loss"][1], rel=0.1)


def test_a_job_with_a_name_goes_on_with_the_rows_that_it_has_trained(run_script, tmp_path):
    cluster = start_server(tmp_path, "--workers", "1")
    try:
        whole, broken, resumed = (
            run_script(NAMED, job, after, **cluster.env())
            for job, after in (("whole", "9"), ("items", "1"), ("items", "9"))
        )
    finally:
        stop(cluster.process)
    assert "interrupted" in broken.stderr
    (losses, loss), (losses_again, loss_again) = answer(whole), answer(resumed)
    assert len(losses) == 4
    assert losses[3] < losses[0]
    assert losses_again == pytest.approx(losses, rel=1e-4)
    assert loss_again == pytest.approx(loss, rel=1e-4)
    assert "goes on" in resumed.stderr
