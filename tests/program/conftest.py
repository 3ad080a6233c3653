import os
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


from nfdt.model.program.manifest import Manifest


@pytest.fixture
def batch():
    draw = np.random.default_rng(0)
    return draw.normal(size=(8, 4)).astype("f4"), draw.normal(size=(8, 1)).astype("f4")


@pytest.fixture
def ship():
    """Pack a model and unpack it from the bytes that would be on a disk."""
    from nfdt.model.program.pack import pack
    from nfdt.model.program.unpack import unpack

    def shipped(model, sample):
        packed = pack(model, sample)
        manifest = Manifest.from_bytes(packed.manifest.to_bytes())
        arrived = unpack(manifest, packed.artifacts.__getitem__, allow_code=packed.code)
        return SimpleNamespace(packed=packed, manifest=manifest, model=arrived)

    return shipped
