"""Numbers that hold for all weights of a push, as the compiled loops take them; see :mod:`nfdt.shard.update_loops`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.shard import update_loops as loops
from nfdt.update_rules.base import RuleState
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_sgd import DelayedSGD
from nfdt.update_rules.reliability import count_push, factor_share, kept_impulse, updates_ahead


class _NumberOps:
    """Functions for rules, on Python's numbers: an operation on them takes a tenth of the time of NumPy's."""

    sqrt: Any = math.sqrt
    power: Any = pow
    maximum: Any = max

    @staticmethod
    def where(condition: bool, x: float, y: float) -> float:
        return x if condition else y

    @staticmethod
    def zeros_like(x: float) -> float:
        return 0.0


_OPS: Any = _NumberOps()


class PushNumbers:
    """The numbers of every push of one shard, computed with the functions of the update rules.

    Args:
        rule: The update rule.
        decay: Weight decay of the optimizer; 0: none.
    """

    def __init__(self, rule: DelayedSGD | DelayedAdam, decay: float) -> None:
        self._decay = decay
        self._adam = rule if isinstance(rule, DelayedAdam) else None
        self._fixed = np.zeros(loops.NUMBERS, np.float32)
        judged = rule.reliability
        self._fixed[[loops.LAMBDA, loops.CLIP, loops.GAP]] = judged.dc_lambda, judged.dc_clip, judged.gap
        if isinstance(rule, DelayedSGD):
            self._momentum, self._later_share = rule.momentum, rule.later_share
            self._fixed[[loops.AT_ONCE, loops.LATER]] = rule.at_once, rule.delivered_later
        else:
            self._momentum = self._later_share = rule.beta_1
            self._fixed[[loops.AT_ONCE, loops.LATER]] = 1.0 - rule.beta_1, rule.beta_1
            self._fixed[[loops.BETA_2, loops.SECOND_SHARE]] = rule.beta_2, 1.0 - rule.beta_2
            self._fixed[loops.EPSILON] = rule.epsilon

    def of(
        self, shard: RuleState, rate: float, factor: float, staleness: int, updates: int
    ) -> tuple[npt.NDArray[np.float32], RuleState]:
        """Return the numbers of a push, shape ``(NUMBERS,)``, and the numbers in the rule's state after it.

        Args:
            shard: State of the rule before the push.
            rate: Learning rate of the optimizer.
            factor: Factor of the learning rate for this push.
            staleness: Number of updates that the gradient missed.
            updates: Number of updates before this one.
        """
        tau, own_rate = float(staleness), rate * factor
        after = count_push(_OPS, {name: float(shard[name]) for name in ("mean_delay", "seen")}, tau)
        kept = kept_impulse(_OPS, self._momentum, after)
        scale = 1.0
        if self._adam is not None:
            bias = float(shard["reserve_bias"])
            # In single precision as in Keras: 1 - b2^n loses digits there, and small weights would differ.
            after["scale"] = scale = float(
                self._adam.scale(np, np.float32(kept), np.float32(bias), np.float32(updates))
            )
            after["reserve_bias"] = kept * bias + self._adam.beta_1
        numbers = self._fixed.copy()
        numbers[loops.RATE], numbers[loops.AHEAD] = own_rate / scale, 1.0 - kept**tau
        if self._adam is not None:
            numbers[loops.AHEAD] *= rate / scale
        numbers[loops.KEPT], numbers[loops.RELEASED] = kept, 1.0 - kept
        numbers[loops.SHARE] = factor_share(_OPS, after)
        if self._decay:
            numbers[loops.DECAY_RATE] = own_rate * self._decay
            numbers[loops.DECAY_AHEAD] = self._later_share * rate * self._decay * updates_ahead(_OPS, kept, tau)
        return numbers, {name: np.float32(value) for name, value in after.items()}
