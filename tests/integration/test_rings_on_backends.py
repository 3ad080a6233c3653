"""Rings and groups of ranks on JAX and PyTorch, in real processes: equal to one process, and after a loss."""

from __future__ import annotations

import pytest

from tests.support.scripts import NFDT, OTHER_BACKENDS, answer

pytestmark = pytest.mark.processes

HEAD = """
import os
os.environ["KERAS_BACKEND"] = "LIBRARY"
import json
import keras
import nfdt
import numpy as np

random = np.random.default_rng(0)
x, y = random.normal(size=(97, 12)).astype("float32"), random.integers(0, 5, 97)
weights = random.uniform(0.0, 2.0, 97)
validation = (x[:33], y[:33])

def build(loss="sparse_categorical_crossentropy", norm=True):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(trainable=False)] if norm else []
    model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(8, "relu", kernel_regularizer="l2"),
                              keras.layers.Dense(5, "softmax")])
    model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"])
    return model
"""

EQUAL = (
    HEAD
    + """
SparseLoss = keras.losses.SparseCategoricalCrossentropy
losses = dict(
    samples="sparse_categorical_crossentropy",
    sums=SparseLoss(reduction="sum"),
    counted=SparseLoss(reduction="mean_with_sample_weight"),
)

class Halves(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.005

def train(loss, batch_size):
    model = build(losses[loss])
    history = model.fit(
        x, y, sample_weight=weights, batch_size=batch_size, epochs=2, shuffle=False, verbose=0,
        validation_data=validation, callbacks=[Halves()],
    )
    return model.get_weights(), history

found = {}
for loss in LOSSES:
    with nfdt.session(workers=2, **OPTIONS):
        ring, history = train(loss, 16)  # the last step has one row, and so a rank without any
    alone, plain = train(loss, 32)
    (statistics,) = history.nfdt.values()
    found[loss] = dict(
        weights=max(float(np.abs(a - b).max()) for a, b in zip(ring, alone, strict=True)),
        logs={name: max(abs(a - b) for a, b in zip(v, plain.history[name])) for name, v in history.history.items()},
        ranks=statistics["ranks"], steps=statistics["steps"], pids=len({r["pid"] for r in statistics["by_rank"]}),
        samples=[rank["samples"] for rank in statistics["by_rank"]],
    )
print(json.dumps(found))
"""
)

KILLED = (
    HEAD
    + """
import time

class Clock(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.monotonic()

clock = Clock()
try:
    with nfdt.session(algorithm="allreduce", workers=2, emulate={"fail": "RANK@20"}):
        build().fit(x, y, epochs=500, verbose=0, callbacks=[clock])
except nfdt.errors.JobFailed as error:
    print(json.dumps(dict(text=str(error), seconds=time.monotonic() - clock.began)))
"""
)

GROUPS = (
    HEAD
    + """
def train(epochs, **options):
    with nfdt.session(algorithm="group-sync", workers=3, **options):
        history = build().fit(x, y, batch_size=8, epochs=epochs, verbose=0, validation_data=validation)
    rows = history.nfdt.values()
    return dict(
        groups=sorted(row["group"] for row in rows), samples=sum(row["samples"] for row in rows),
        steps={",".join(map(str, row["group"])): row["steps"] for row in rows}, loss=history.history["val_loss"],
    )

print(json.dumps(dict(
    measured=train(4, emulate={"step_ms": [60, 60, 300]}),
    lost=train(4, groups="0,1;2", batch="fixed", emulate={"step_ms": [10, 10, 10], "fail": "1@4"}),
)))
"""
)

ALLREDUCE, ONE_GROUP = dict(algorithm="allreduce"), dict(algorithm="group-sync", groups="1", batch="fixed")
PYTHON = (NFDT[0],)
on_each_backend = pytest.mark.parametrize("backend", OTHER_BACKENDS)


@pytest.mark.feature("`allreduce` on JAX and PyTorch, by Gloo", area="Algorithms")
@on_each_backend
@pytest.mark.parametrize("options", [ALLREDUCE, ONE_GROUP], ids=["ring", "group"])
@pytest.mark.parametrize("losses", [("samples",), pytest.param(("sums", "counted"), marks=pytest.mark.long)])
def test_two_ranks_equal_one_process_with_the_global_batch(run_script, backend, losses, options):
    script = EQUAL.replace("LIBRARY", backend).replace("LOSSES", repr(losses)).replace("OPTIONS", repr(options))
    found = answer(run_script(script, command=PYTHON))
    assert found.keys() == set(losses)
    for loss, got in found.items():
        assert got["weights"] < 2e-5
        assert got["logs"].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
        # Keras' metric of the loss is a mean over batches: of other losses than means over samples it depends on them.
        exact = got["logs"] if loss == "samples" else {name: got["logs"][name] for name in ("accuracy", "val_accuracy")}
        assert max(exact.values()) < 1e-4
        assert (got["ranks"], got["steps"], got["pids"]) == (2, 2 * 4, 2)
        assert sorted(got["samples"]) == [2 * 48, 2 * 49]


@pytest.mark.feature("`group-sync` on JAX and PyTorch, by Gloo", area="Algorithms")
@on_each_backend
def test_groups_are_formed_by_speed_and_go_on_without_one_that_is_lost(run_script, backend):
    found = answer(run_script(GROUPS.replace("LIBRARY", backend), command=PYTHON))
    measured, lost = found["measured"], found["lost"]
    assert measured["groups"] == [[0, 1], [2]]
    assert measured["samples"] == 4 * 97
    assert measured["loss"][-1] < measured["loss"][0]
    assert lost["steps"]["0,1"] <= 4
    assert lost["steps"]["2"] > lost["steps"]["0,1"]


@pytest.mark.feature("A rank on JAX or PyTorch is killed: the job ends and names it", area="Failures")
@on_each_backend
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)], ids=["a rank", "the leader"])
def test_a_rank_that_is_killed_ends_the_job_and_is_named(run_script, backend, rank):
    script = KILLED.replace("LIBRARY", backend).replace("RANK", str(rank))
    found = answer(run_script(script, command=PYTHON))
    assert f"ring of 2 ranks ended: rank {rank} is lost" in found["text"]
    assert "SIGKILL" in found["text"]
    assert found["seconds"] < 60
