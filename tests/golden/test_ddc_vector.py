"""The published trajectory of DDC-ASGD (algorithms 5.1), digit by digit."""

import numpy as np
import pytest

from nfdt.core.spec import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from tests.simulated_shard import SimulatedShard

# (worker, gradient, learning rate), and after it (tau, w, R, h)
PUSHES = [
    (0, (0.5, -0.25), 0.1),
    (1, (0.4, 0.1), 0.1),
    (0, (0.3, -0.2), 0.1),
    (2, (-0.1, 0.2), 0.05),
    (1, (0.2, 0.2), 0.05),
    (2, (0.3, 0.1), 0.05),
]
EXPECTED = [
    (0, (0.9500000000, -1.9750000000), (0.4500000000, -0.2250000000), (0.9500000000, -1.9750000000)),
    (1, (0.9088978199, -1.9577822434), (0.4088978199, -0.1744489090), (0.8715498381, -1.9418483979)),
    (1, (0.8742511318, -1.9430008563), (0.3742511318, -0.1596675219), (0.8425401232, -1.9294719242)),
    (3, (0.8494225788, -1.9340701658), (0.3390250575, -0.1296812601), (0.7838693828, -1.9089952610)),
    (2, (0.8275703536, -1.9329835543), (0.3227155804, -0.0579934800), (0.7882972104, -1.9259259892)),
    (1, (0.7997453438, -1.9296769440), (0.3748520567, -0.0521195940), (0.7767130210, -1.9264745197)),
]


def test_ddc_reproduces_the_golden_vector_in_float64():
    rule = make_rule(resolve_algorithm("ddc-asgd"), OptimizerTraits("sgd", momentum=0.9))
    shard = SimulatedShard(rule, np.array([1.0, -2.0]))
    for worker in range(3):
        shard.pull(worker)
    for (worker, gradient, rate), (tau, weights, reserve, reply) in zip(PUSHES, EXPECTED, strict=True):
        received = shard.push(worker, np.array(gradient), rate)
        assert shard.last_staleness == tau
        assert shard.weights == pytest.approx(weights, abs=1e-10)
        assert shard.state["reserve"] == pytest.approx(reserve, abs=1e-10)
        assert received == pytest.approx(reply, abs=1e-10)
        assert received.dtype == np.float64
