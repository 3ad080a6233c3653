"""A training whose loss becomes NaN: the script is warned when that happens, not at its end."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.scripts import environment

pytestmark = pytest.mark.processes

NAN = """
import keras, nfdt, numpy as np
x, y = np.ones((256, 4), "float32"), np.ones((256, 1), "float32")

class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"EPOCH {epoch}", file=__import__("sys").stderr, flush=True)

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e12), "mse")
with nfdt.session(workers=1, algorithm=ALGORITHM):
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Say()])
"""


def test_a_warning_comes_in_the_epoch_that_diverges_and_only_once():
    program = NAN.replace("ALGORITHM", "'asgd'")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    before = done.stderr.partition("EPOCH 1")[0]
    warning = "The training diverges: (loss|Gradients)"
    assert len(re.findall(warning, before)) == len(re.findall(warning, done.stderr)) == 1
    assert "clipnorm" in before
    assert done.stderr.count("Advice:") == 1
    assert done.stderr.count("WARNING") <= 2  # the other one counts the gradients that were refused


@pytest.mark.long
def test_a_loss_that_grows_out_of_all_proportion_is_warned_of_although_it_is_finite():
    program = NAN.replace("1e12", "25.0").replace("ALGORITHM", "'asgd'").replace("epochs=3", "epochs=1")
    program += "\nprint(model.history.history['loss'][0], model.history.nfdt['worker-0']['dropped'])"
    done = subprocess.run(
        [sys.executable, "-c", program.replace("batch_size=8", "batch_size=32")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loss, dropped = done.stdout.split()
    assert 1e6 < float(loss) < float("inf")
    assert dropped == "0"
    assert (
        len(re.findall(r"The training diverges: loss is \S+ in epoch 1, after \S+ before\. Advice:", done.stderr)) == 1
    )


@pytest.mark.long
def test_the_first_line_names_job_algorithm_workers_and_logs():
    program = NAN.replace("1e12", "0.01").replace("ALGORITHM", "'ddc-asgd'")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert re.search(r"^nfdt: job job-\w+, ddc-asgd on 1 worker, logs in /\S+/logs, look at it", done.stderr, re.M)
    assert "diverges" not in done.stderr
