"""Accuracy of training with encoded gradients and weights, with every preset."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from nfdt.core.specs.presets import AXES, PRESETS
from nfdt.transport.choice import CodecChoice, make_choice
from tests.support import local_cluster
from tests.support.local_cluster import train

pytestmark = pytest.mark.processes

EPOCHS = 12
FLAT = [n for n, row in PRESETS.items() if row["topology"] == "flat" and n not in ("ddc-asgd", "bsp", "h-ps")]
LONG = pytest.mark.long  # for presets and codecs that are like others here


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order]
    return (x[:1344], y[:1344]), (x[1344:], y[1344:])


def classifier(momentum):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(
        keras.optimizers.SGD(0.05, momentum=momentum), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def learn(digits, algorithm, codec, momentum=0.9, **options):
    data, validation = digits
    fit = {"workers": 2, "validation": validation, "shuffle": True, "epochs": EPOCHS, **options}
    return train(classifier(momentum), *data, algorithm=algorithm, overrides={"codec": codec}, **fit)


def accuracy(outcome):
    return outcome.epochs[-1]["val_logs"]["accuracy"]


@pytest.fixture(scope="module")
def exact(digits):
    """Accuracy without codecs, measured once for each preset."""
    return {algorithm: accuracy(learn(digits, algorithm, "identity")) for algorithm in ("bsp", "ddc-asgd")}


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        ("bsp", "int4"),
        *(("ddc-asgd", name) for name in ("int4", "top-k", "adaptive")),
        *(pytest.param("ddc-asgd", name, marks=LONG) for name in ("bf16", "fp16", "int8")),
    ],
)
def test_digits_are_learnt_as_well(digits, exact, algorithm, codec):
    outcome = learn(digits, algorithm, codec)
    assert accuracy(outcome) >= exact[algorithm] - 0.03
    assert sum(shard["pushes"] for shard in outcome.staleness) == EPOCHS * 42
    assert sum(use["messages"] for worker in outcome.codecs for use in worker["push"].values()) == EPOCHS * 42


class EveryCodec(CodecChoice):
    """Choice of codecs that uses all of them in turn."""

    def __init__(self, spec, size):
        self.spec, self.size, self.number = spec, size, 0
        self.next()

    def next(self):
        self.number += 1
        names = [name for name in AXES["codec"] if name != "adaptive"]
        push, reply = (names[(self.number + i) % len(names)] for i in (0, 2))
        made = make_choice(self.spec.model_copy(update={"codec": push, "reply_codec": reply}), self.size)
        if made is not None:
            self.push, self.reply = made.push, made.reply

    def pushes(self, gradient, residual, compute_s):
        self.next()


@pytest.mark.feature("Compressed gradients, with every preset", area="Algorithms")
@pytest.mark.parametrize("preset", ["ddc-asgd", "bsp", "h-ps", *(pytest.param(preset, marks=LONG) for preset in FLAT)])
def test_every_preset_trains_with_every_codec(preset, digits, monkeypatch):
    monkeypatch.setattr(local_cluster, "make_choice", EveryCodec)
    outcome = learn(digits, preset, "identity", momentum=0.5, epochs=4, shards=2)
    assert accuracy(outcome) > 0.7
    assert set(outcome.codecs[0]["push"]) == {name for name in AXES["codec"] if name != "adaptive"}


def test_an_adaptive_job_sends_fewer_bits_over_a_slow_link(digits):
    options = {"transport": "shared_memory", "bandwidth_mbit": (0.5,), "epochs": 3}  # an exchange of 0.6 s
    outcome = learn(digits, "ddc-asgd", "adaptive", **options)
    for worker in outcome.codecs:
        assert worker["decisions"], worker
        assert {worker["decisions"][-1]["push"], worker["decisions"][-1]["reply"]} <= {"int8", "int4"}
        assert worker["decisions"][-1]["send_mbit"] > 0.125
        few = sum(worker["push"][name]["messages"] for name in ("int8", "int4") if name in worker["push"])
        assert few > worker["push"]["identity"]["messages"]
