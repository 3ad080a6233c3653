"""Workers that train the next epoch ahead: validation and callbacks see exactly the weights of each epoch's end."""

from __future__ import annotations

import pytest

from tests.support.scripts import answer

pytestmark = pytest.mark.processes

SCRIPT = """
import json, sys, time
import keras
import numpy as np
import nfdt

SAMPLES, BATCH, EPOCHS = 640, 16, 4
rng = np.random.default_rng(0)
x = rng.normal(size=(SAMPLES, 16)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
keras.utils.set_random_seed(1)
hidden = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(1, "sigmoid")])
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
seen = []

class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.3)  # workers go on meanwhile
        loss, accuracy = model.evaluate(x[:100], y[:100], verbose=0)
        seen.append([int(model.optimizer.iterations), logs["val_loss"], loss, logs["val_accuracy"], accuracy])

kind = sys.argv[1]
callbacks = [Look()]
if kind == "rate":
    callbacks.append(keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0))
if kind == "stop":
    early = keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1, restore_best_weights=True)
    callbacks.append(early)

@nfdt.distribute(workers=2, algorithm="ddc-asgd")
def main():
    options = {"validation_data": (x[:100], y[:100]), "batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
    return model.fit(x, y, callbacks=callbacks, **options)

history = main()
done = {
    "seen": seen,
    "losses": history.history["loss"],
    "iterations": int(model.optimizer.iterations),
    "rate": float(model.optimizer.learning_rate),
    "final": float(model.evaluate(x[:100], y[:100], verbose=0)[0]),
}
print(json.dumps(done))
"""


@pytest.mark.parametrize("kind", ["none", "rate", "stop"])
def test_callbacks_and_validation_have_the_weights_of_their_epoch(run_script, kind):
    done = answer(run_script(SCRIPT, kind))
    epochs = 2 if kind == "stop" else 4
    assert [row[0] for row in done["seen"]] == [40 * (epoch + 1) for epoch in range(epochs)]
    for _, loss, again, accuracy, exactly in done["seen"]:
        assert again == pytest.approx(loss, rel=1e-5)
        assert exactly == pytest.approx(accuracy)
    assert done["iterations"] == 40 * epochs
    assert len(done["losses"]) == epochs
    restored = {"stop": done["seen"][0]}.get(kind, done["seen"][-1])
    assert done["final"] == pytest.approx(restored[1], rel=1e-5)
    assert done["rate"] == pytest.approx(0.01 * 0.5 ** (3 if kind == "rate" else 0))
