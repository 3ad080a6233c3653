"""Equality of Keras' training with a packed model, shards built from it, and a worker's gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.core.sharding import count_shards
from nfdt.core.wire.job_token import worker_token
from nfdt.model.backends.tensorflow_step import GradientStep
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from nfdt.model.program.unpack import unpack
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.shard_cluster import rule_spec


def made(optimizer):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="relu", kernel_constraint=keras.constraints.MaxNorm(1.0))]
    model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])
    if isinstance(optimizer, keras.optimizers.AdamW):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20), momentum=0.9, nesterov=True),
        lambda: keras.optimizers.AdamW(0.01, clipnorm=0.5),
        lambda: keras.optimizers.RMSprop(0.01, use_ema=True),
        lambda: keras.optimizers.Muon(0.01),
    ],
    ids=["nesterov", "adamw", "rmsprop", "muon"],
)
def test_a_packed_model_trains_as_it_does_in_keras(optimizer):
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(16, 5)).astype("f4"), rng.integers(0, 3, 16)) for _ in range(4)]
    local = made(optimizer())
    packed = pack(local, batches[0])
    manifest = packed.manifest
    state = load_state(packed.artifacts[manifest.state])
    layout = manifest.layout
    shards = count_shards(manifest, 2 if manifest.optimizer_variables else 1)
    running = [
        start_shard(manifest, state, rule_spec("ddc"), i, shards, workers=1, token="t", leased=False)
        for i in range(shards)
    ]
    client = StreamClient([r.address for r in running], layout, "w", worker_token("t", "w"), timeout_s=60)
    try:
        step = GradientStep(unpack(manifest, packed.artifacts.__getitem__, allow_code=False), layout)
        weights = client.pull().weights
        for x, y in batches:
            local.train_on_batch(x, y)
            gradient = np.asarray(step(weights, (x, y)).gradient)
            weights = client.push(gradient, samples=16).weights
            wanted = layout.flatten([v.value.numpy() for v in local.trainable_variables])
            np.testing.assert_allclose(weights, wanted, rtol=1e-4, atol=1e-5)
        read = {}
        for shard in running:
            read.update(shard.store.read()[1])
        for index, variable in enumerate(local.optimizer.variables):
            np.testing.assert_allclose(read[index], variable.value.numpy(), rtol=1e-3, atol=1e-5)
    finally:
        client.close()
        [r.stop(0) for r in running]
