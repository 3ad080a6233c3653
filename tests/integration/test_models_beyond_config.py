"""Models that ``get_config`` does not describe, on a worker of a cluster and in plain Keras: the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models_beyond_config import MODELS
from tests.support.scripts import answer

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys
sys.path.append({root!r})
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import nfdt
from tests.support.models_beyond_config import make

draw = np.random.default_rng(0)
x, y = draw.normal(size=(24, 4)).astype("f4"), draw.normal(size=(24, 1)).astype("f4")

def fit(model):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return [variable.numpy() for variable in model.variables]

models, here, out = {{}}, {{}}, {{}}
for description in {descriptions!r}:
    model = models[description] = make(description)
    model(x[:8])
    start = [variable.numpy() for variable in model.variables]
    here[description] = fit(model)
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
with nfdt.session(workers=1):
    for description, model in models.items():
        there = fit(model)
        out[description] = max(float(np.abs(a - b).max()) for a, b in zip(here[description], there, strict=True))
print()
print(json.dumps(out))
"""

FEW = [
    "layers appended to a list, put into a dictionary and a tuple",
    "attribute that only training uses",
    "weights tied",
    "attribute of the optimizer changed",
]


@pytest.mark.parametrize("descriptions", [FEW, pytest.param(list(MODELS), marks=pytest.mark.long)], ids=["few", "all"])
def test_the_cluster_computes_what_keras_computes(descriptions, tmp_path, script_fork_server):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), descriptions=descriptions))
    differences = answer(script_fork_server.run(script))
    assert differences.keys() == set(descriptions)
    assert {name: value for name, value in differences.items() if value > 1e-5} == {}
