"""A GAN with an optimizer for each network, trained by several worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import answer

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SCRIPT = f"""
import json, os, sys
sys.path.append({str(ROOT)!r})
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import nfdt
from tests.support.several_optimizers import WassersteinGan, adam, gan, points

real, noise = points(256), np.random.default_rng(1).normal(size=(200, 3)).astype("f4")

class Rates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 5:
            self.model.d_optimizer.learning_rate = 0.001

def distance(model):
    made = np.asarray(model.generator(noise))
    return float(np.abs(made.mean(0) - real.mean(0)).max() + np.abs(made.std(0) - real.std(0)).max())

model = gan(WassersteinGan, adam(0.002), adam(0.002))
before = distance(model)
with nfdt.session(workers=2):
    history = model.fit(real, batch_size=16, epochs=12, verbose=0, callbacks=[Rates()])
print()
print(json.dumps(dict(
    before=before, after=distance(model), workers={{name: w["steps"] for name, w in history.nfdt.items()}},
    updates=[int(model.d_optimizer.iterations), int(model.g_optimizer.iterations)],
    rates=[float(model.d_optimizer.learning_rate), float(model.g_optimizer.learning_rate)],
    slots=float(np.abs(model.d_optimizer.variables[2]).sum()), losses=history.history["d_loss"],
)))
"""


@pytest.mark.feature("Several optimizers in one model (GAN), on several workers", area="Models")
def test_two_workers_train_a_gan(run_script):
    got = answer(run_script(SCRIPT))
    assert len(got["workers"]) == 2
    assert all(got["workers"].values()), "both have trained"
    assert got["after"] < 2 * got["before"]
    assert got["updates"] == [3 * 12 * 16, 12 * 16]
    assert got["rates"] == pytest.approx([0.001, 0.002])
    assert got["slots"] > 0
    assert abs(got["losses"][-1]) < 5
