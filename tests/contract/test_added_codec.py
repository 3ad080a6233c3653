"""Codec added by one class and one registry line: it trains a job over shards with streams."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.codecs import DECODERS
from nfdt.codecs.base import Codec
from nfdt.core.specs.presets import AXES, CODEC_FACTS, CodecFacts
from tests.support.local_cluster import train

NAME = "upper-half"
X = np.random.default_rng(0).normal(size=(192, 6)).astype(np.float32)
Y = X @ np.arange(6, dtype=np.float32)[:, None]


class UpperHalf(Codec):
    """Codec of the upper 16 bits of each element, which is rounded towards zero."""

    name = NAME
    block = 0

    def encoded_bytes(self, size):
        return 2 * size

    def encode(self, vector):
        return np.ascontiguousarray(np.ascontiguousarray(vector).view(np.uint16)[1::2]).view(np.uint8)

    def decode(self, payload, out):
        out[:] = (payload.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(CODEC_FACTS, NAME, CodecFacts())
    monkeypatch.setitem(DECODERS, NAME, UpperHalf())
    monkeypatch.setitem(AXES, "codec", (*AXES["codec"], NAME))


@pytest.mark.parametrize("transport", ["in_process", "stream", "shared_memory"])
def test_a_codec_is_added_in_one_file(transport):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    options = {"workers": 2, "shards": 2, "epochs": 3, "transport": transport}
    outcome = train(model, X, Y, algorithm="ddc-asgd", overrides={"codec": NAME}, **options)
    losses = [logs["logs"]["loss"] for logs in outcome.epochs]
    assert losses[-1] < losses[0]
    for worker in outcome.codecs:
        assert set(worker["push"]) == {NAME}
        assert set(worker["reply"]) == {NAME, "identity"}  # the first pull is exact
