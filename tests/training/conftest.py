import os
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture
def batches():
    """Return five batches of 8 and a last one of 3."""
    draw = np.random.default_rng(0)
    sizes = [8, 8, 8, 8, 8, 3]
    return [(draw.normal(size=(n, 4)).astype("f4"), draw.normal(size=(n, 1)).astype("f4")) for n in sizes]


@pytest.fixture
def worker():
    """Return a worker's model for a user's model, and an optimizer as on a shard: with one flat variable."""
    import keras

    from nfdt.model.backends.tensorflow_step import GradientStep
    from nfdt.model.program.pack import pack
    from nfdt.model.program.state import load_state
    from nfdt.model.program.unpack import unpack

    def make(model, sample):
        packed = pack(model, sample)
        arrived = unpack(packed.manifest, packed.artifacts.__getitem__, allow_code=True)
        layout = packed.manifest.layout
        weights = load_state(packed.artifacts[packed.manifest.state]).weights
        variable = keras.Variable(weights, name="flat")
        optimizer = keras.saving.deserialize_keras_object(packed.manifest.optimizer)
        optimizer.build([variable])
        return SimpleNamespace(
            model=arrived,
            manifest=packed.manifest,
            layout=layout,
            weights=variable,
            optimizer=optimizer,
            step=GradientStep(arrived, layout, loss_scale=packed.manifest.loss_scale),
        )

    return make
