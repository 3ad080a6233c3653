"""A trajectory of DDC-ASGD, calculated apart from this code in plain Python, digit by digit."""

import numpy as np
import pytest

from nfdt.core.spec import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from nfdt.update_rules.blocks import KernelBlocks
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
    (1, (0.9061464668, -1.9551367483), (0.4336599983, -0.1982583654), (0.8665367527, -1.9370281904)),
    (1, (0.8692513330, -1.9382377413), (0.3982678565, -0.1823613531), (0.8355053418, -1.9227859178)),
    (3, (0.8434020761, -1.9289910688), (0.3556277154, -0.1395329122), (0.7746386239, -1.9020112686)),
    (2, (0.8177395724, -1.9235470030), (0.3631807604, -0.1008732978), (0.7735419853, -1.9112711425)),
    (1, (0.7843963938, -1.9210249623), (0.4401174251, -0.0615913093), (0.7573539209, -1.9172405602)),
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
