"""Update rule added by one class and one registry line: it trains a job over shards with streams."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.core.specs.presets import AXES, RULE_FACTS, RuleFacts
from nfdt.update_rules import RULES
from nfdt.update_rules.base import Correction, UpdateRule, scalar
from tests.support.local_cluster import train

NAME = "halved-rate"
X = np.random.default_rng(0).normal(size=(192, 6)).astype(np.float32)
Y = X @ np.arange(6, dtype=np.float32)[:, None]


class HalfRate(UpdateRule):
    """Rule that applies each gradient at half of the learning rate."""

    name = NAME

    def correct(self, ops, push, shard, worker):
        return Correction(push.gradient, scalar(ops, push.staleness, 0.5), shard, worker)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(RULE_FACTS, NAME, RuleFacts())
    monkeypatch.setitem(RULES, NAME, lambda spec, traits, blocks: HalfRate())
    monkeypatch.setitem(AXES, "update_rule", (*AXES["update_rule"], NAME))


def job(rule, rate, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return train(model, X, Y, algorithm="asgd", overrides={"update_rule": rule}, transport="stream", **options)


def test_an_update_rule_is_added_in_one_file():
    outcome = job(NAME, 0.02, workers=2, shards=2, epochs=3)
    losses = [logs["logs"]["loss"] for logs in outcome.epochs]
    assert losses[-1] < losses[0]


def test_the_added_rule_is_the_one_that_corrects():
    np.testing.assert_allclose(job(NAME, 0.02).weights, job("plain", 0.01).weights, rtol=1e-5, atol=1e-6)
    assert not np.allclose(job(NAME, 0.02).weights, job("plain", 0.02).weights, rtol=1e-5, atol=1e-6)
