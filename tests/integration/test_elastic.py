"""Allreduce rings that survive the loss of ranks, with real launchers and killed processes."""

from __future__ import annotations

import json
import sys

import pytest

from nfdt.core.host.launcher_rank import local_names
from tests.support.horovod_scripts import MODELS, left_behind
from tests.support.scripts import answer

pytestmark = pytest.mark.horovod

LOG_LINES = """
import logging, os, signal
import psutil

class LogLines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())
    def has(self, text):
        return any(text in line for line in self.lines)

log = LogLines()
logging.getLogger("nfdt_client").addHandler(log)
logging.getLogger("nfdt_client").setLevel("INFO")
"""


@pytest.mark.long
def test_a_ring_that_loses_its_leader_and_gets_another_rank_equals_one_process(run_script, tmp_path):
    got = answer(
        run_script(
            MODELS
            + LOG_LINES
            + """
def momentum(): return keras.optimizers.SGD(0.05, momentum=0.9)
def rates(): return [keras.callbacks.LearningRateScheduler(lambda epoch: [0.05, 0.02, 0.04][epoch])]
given = dict(epochs=3, verbose=0, shuffle=False, validation_split=0.1)

with hfdt.session(workers=2, min_workers=2, commit_steps=3, host_cooldown_s=1, emulate={"fail": "0@20"}):
    model = dense(momentum())
    history = model.fit(x, y, batch_size=32, callbacks=rates(), **given)
alone = dense(momentum())
logs = alone.fit(x, y, batch_size=64, callbacks=rates(), **given).history
print(json.dumps(dict(
    difference=difference(model, alone), statistics=history.nfdt["worker-0"],
    logs=max(abs(a - b) for key in logs for a, b in zip(logs[key], history.history[key])),
    iterations=int(model.optimizer.iterations) == int(alone.optimizer.iterations),
    news=[line for line in log.lines if "came or went" in line],
)))
""",
            RING_TEST=str(tmp_path),
        )
    )
    assert got["difference"] < 2e-5
    assert got["logs"] < 2e-5
    assert got["iterations"]
    assert got["statistics"]["samples"] == 3 * 902
    assert got["statistics"]["ranks"] == 2
    assert got["statistics"]["resets"] == 1
    assert got["statistics"]["redone_steps"] == 1  # killed at its 20th step, the second after a commit: one was lost
    assert "2 are there now" in got["news"][0]
    assert left_behind(str(tmp_path)) == []


@pytest.mark.feature("Elastic allreduce", area="Algorithms")
@pytest.mark.long
def test_a_rank_joins_and_one_is_killed_while_a_discovery_file_changes(run_script, tmp_path):
    (tmp_path / "hosts").write_text("localhost:2\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o700)
    got = answer(
        run_script(
            MODELS
            + LOG_LINES
            + """
def youngest_rank():
    ours = psutil.Process().children(recursive=True)
    ranks = [p for p in ours if p.cmdline()[1:4] == ["-P", "-m", "hfdt.runtime.rank"]]
    return max(ranks, key=lambda p: p.create_time())

class Scripted(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            open("hosts", "w").write("localhost:3\\n")
        if log.has("3 are there now") and not log.has("killing"):
            logging.getLogger("nfdt_client").info("killing %d", youngest_rank().pid)
            youngest_rank().kill()
        elif log.has("killing") and [line for line in log.lines if "are there now" in line][-1:] != joined():
            self.model.stop_training = True

def joined():
    return [line for line in log.lines if "3 are there now" in line][:1]

options = dict(min_workers=1, max_workers=3, host_discovery_script="./discover.sh", commit_steps=5, host_cooldown_s=60)
with hfdt.session(workers=3, emulate={"step_ms": [15] * 8}, timeline="trace.json", **options):  # begins with 2
    model = dense(keras.optimizers.SGD(0.05))
    history = model.fit(x, y, batch_size=32, epochs=400, verbose=0, callbacks=[Scripted()])
print(json.dumps(dict(
    finite=all(bool(np.isfinite(w).all()) for w in model.get_weights()), epochs=len(history.epoch),
    statistics=history.nfdt["worker-0"], loss=history.history["loss"],
    news=[line for line in log.lines if "came or went" in line],
)))
""",
            RING_TEST=str(tmp_path),
        )
    )
    statistics = got["statistics"]
    assert got["finite"]
    assert got["loss"][-1] < got["loss"][0]
    assert statistics["samples"] == got["epochs"] * 1003
    assert statistics["resets"] == 2
    assert statistics["ranks"] == 2
    assert [line.split("went: ")[1][:1] for line in got["news"]] == ["3", "2"]
    assert left_behind(str(tmp_path)) == []
    assert json.loads((tmp_path / "trace.json").read_text())


def test_too_few_hosts_at_the_start_are_named_and_the_log_of_the_ring_is_kept(run_script, tmp_path):
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o700)
    got = answer(
        run_script(
            MODELS
            + """
from pathlib import Path
from nfdt_client import kept_state
from nfdt.core.errors import JobFailed
kept_state.failures_folder = lambda: Path("kept")
try:
    with hfdt.session(workers=3, min_workers=2, host_discovery_script="./discover.sh", start_timeout_s=5):
        dense(keras.optimizers.SGD(0.05)).fit(x, y, batch_size=32, verbose=0)
    reason = ""
except JobFailed as error:
    reason = str(error)
print(json.dumps(dict(reason=reason, kept=[path.name for path in Path("kept").rglob("ring-*.log")])))
""",
            RING_TEST=str(tmp_path),
        )
    )
    assert "did not come up within 5 s" in got["reason"]
    assert f"{script} must name hosts with 2 slots" in got["reason"]
    assert len(got["kept"]) == 1
    assert left_behind(str(tmp_path)) == []


SCRIPT = """
import os, sys, signal
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import hfdt.keras as hvd

hvd.init()
keras.utils.set_random_seed(7)
x = np.random.default_rng(0).random((512, 8), np.float32)
y = (x.sum(1, keepdims=True) > 4).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
model.compile(optimizer, "binary_crossentropy", jit_compile=False)
state = hvd.elastic.KerasState(model, epoch=0, batch=0, worlds=0)

class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if state.epoch == 1 and batch == 5 and hvd.rank() == 1 and state.worlds == 1:
            os.kill(os.getpid(), signal.SIGKILL)

@hvd.elastic.run
def train(state):
    state.worlds += 1
    state.save()
    model.fit(x, y, batch_size=32, epochs=4 - state.epoch, verbose=0, callbacks=[
        Die(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=4)])

train(state)
sums = np.asarray(hvd.allgather(np.asarray([[float(np.abs(w).sum()) for w in model.get_weights()]])))
assert np.isfinite(sums).all() and (sums == sums[0]).all(), sums
if hvd.rank() == 0:
    print("ANSWER", state.epoch, state.worlds, hvd.size(), int(model.optimizer.iterations))
"""


@pytest.mark.feature("Horovod scripts on `hfdt.keras`", area="Launchers and environments")
def test_a_script_on_hfdt_keras_outlives_a_rank(run_script, tmp_path):
    hosts = ",".join(f"{name}:1" for name in local_names(3))
    launcher = (sys.executable, "-P", "-m", "hfdt.horovodrun", "--loopback", "--gloo", "-np", "3", "--min-np", "2")
    done = run_script(SCRIPT, command=(*launcher, "-H", hosts, sys.executable), RING_TEST=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    epoch, worlds, size, iterations = (int(word) for word in done.stdout.split("ANSWER")[1].split()[:4])
    assert (epoch, worlds, size) == (4, 2, 2)
    assert iterations == 16 + 4 + 3 * 16  # an epoch; up to the commit before the death; that epoch again, and two more
    assert left_behind(str(tmp_path)) == []
