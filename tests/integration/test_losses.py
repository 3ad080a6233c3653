"""Losses with denominators of their own, on processes: shards, and ranks of which one has no rows in the last step."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from tests.support import loss_cases
from tests.support.local_cluster import train
from tests.support.loss_cases import CASES, build, data, flat
from tests.support.scripts import answer

pytestmark = pytest.mark.processes

KEPT = 38  # three rounds of 12, and one of 2
SCRIPT = """
import json
import nfdt

def fit(model, batch, x, y, weights):
    model.fit(x, y, sample_weight=weights, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return flat(model)

found = {}
with nfdt.session(workers=3, **OPTIONS):
    for name in LOSSES:
        case = CASES[name]
        arrays = [None if part is None else part[:KEPT] for part in data(**case)]
        together = fit(build(**case), 4, *arrays)
        found[name] = together.tolist()
print(json.dumps(found))
"""
LOSSES = ["sum, with a regularizer", "masked and weighted"]


def alone(loss):
    """Return the weights of Keras alone."""
    x, y, weights = (None if part is None else part[:KEPT] for part in data(**CASES[loss]))
    model = build(**CASES[loss])
    model.fit(x, y, sample_weight=weights, batch_size=12, epochs=2, shuffle=False, verbose=0)
    return flat(model)


@pytest.mark.parametrize("loss", ["sum", "masked"])
@pytest.mark.parametrize("transport", ["stream", "shared_memory"])
def test_denominators_reach_the_shards(loss, transport):
    x, y, _ = (None if part is None else part[:KEPT] for part in data(**CASES[loss]))
    fit = {"algorithm": "bsp", "workers": 3, "shards": 2, "transport": transport, "batch_size": 4, "epochs": 2}
    outcome = train(build(**CASES[loss]), x, y, shuffle=False, **fit)
    np.testing.assert_allclose(outcome.weights, alone(loss), rtol=1e-4, atol=1e-6)


@pytest.mark.horovod
@pytest.mark.feature("Losses that are sums, masked, or divided by weights", area="Algorithms")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"algorithm": "allreduce"}, id="allreduce"),
        pytest.param(
            {"algorithm": "group-sync", "groups": "1", "batch": "fixed"}, id="group-sync", marks=pytest.mark.long
        ),
    ],
)
def test_ranks_train_as_one_process_does(run_script, options):
    names = f"OPTIONS, LOSSES, KEPT = {options!r}, {LOSSES!r}, {KEPT}"
    found = answer(run_script("\n".join([inspect.getsource(loss_cases), names, SCRIPT])))
    for loss in LOSSES:
        np.testing.assert_allclose(found[loss], alone(loss), rtol=1e-4, atol=1e-6, err_msg=loss)
