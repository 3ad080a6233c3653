"""Trajectory of DDC-ASGD, computed independently of this code in plain Python, to the last digit."""

import numpy as np
import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from nfdt.update_rules.blocks import KernelBlocks
from tests.support.simulated_shard import SimulatedShard

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
    (1, (0.9088978199, -1.9544489100), (0.4088978199, -0.2044489100), (0.8715498381, -1.9357749190)),
    (1, (0.8742511318, -1.9371255659), (0.3742511318, -0.1871255659), (0.8425401232, -1.9212700616)),
    (3, (0.8519804004, -1.9313865608), (0.3160046632, -0.1094350864), (0.7908783811, -1.9102264149)),
    (2, (0.8261860595, -1.9304542793), (0.3496359080, -0.0490772192), (0.7836368245, -1.9244817859)),
    (1, (0.7887076780, -1.9327706013), (0.4721118662, 0.0019245720), (0.7596993461, -1.9328888543)),
]


def test_ddc_reproduces_the_golden_vector_in_float64():
    blocks = KernelBlocks([(2,)], [False])
    rule = make_rule(resolve_algorithm("ddc-asgd"), OptimizerTraits("sgd", momentum=0.9), blocks)
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
