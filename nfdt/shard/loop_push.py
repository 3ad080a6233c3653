"""One push through :mod:`nfdt.shard.loop_engine`: its place in the order of updates, and its numbers for the loops."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import NfdtError
from nfdt.shard import update_loops as at
from nfdt.update_rules.base import RuleState
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_sgd import DelayedSGD
from nfdt.update_rules.reliability import count_push, factor_share, kept_impulse, updates_ahead

UPDATE_S = 60.0
"""Longest wait for the push before, whose part takes milliseconds."""


class PendingUpdate:
    """Place of one push in the order of updates, each of which works on one stripe after the other.

    Args:
        before: The update before, or None.
        stripes: Number of stripes.
    """

    def __init__(self, before: PendingUpdate | None, stripes: int) -> None:
        self._before, self._stripes = before, stripes
        self._done = 0
        self._advanced = threading.Condition()

    def wait(self, stripe: int) -> None:
        """Wait until the push before has updated this stripe.

        Raises:
            NfdtError: it takes too long.
        """
        if self._before is not None:
            self._before.reach(stripe + 1)

    def reach(self, count: int) -> None:
        """Wait until this push has updated ``count`` stripes, or all."""
        count = min(count, self._stripes)
        if self._done >= count:
            return
        with self._advanced:
            if not self._advanced.wait_for(lambda: self._done >= count, UPDATE_S):
                raise NfdtError(
                    f"Update: expected the push before to finish its part within {UPDATE_S:g} s. Received: "
                    f"{self._done} of {self._stripes} parts. The shard is overloaded; look at its machine."
                )

    def complete(self) -> None:
        """Wait until this push has updated all stripes."""
        self.reach(self._stripes)

    def advance(self, count: int) -> None:
        """Declare ``count`` stripes updated."""
        with self._advanced:
            self._done = count
            self._advanced.notify_all()

    def end(self) -> None:
        """Declare all stripes updated, and forget the push before."""
        self.advance(self._stripes)
        self._before = None


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
        self._fixed = np.zeros(at.NUMBERS, np.float32)
        reliability = rule.reliability
        self._fixed[[at.LAMBDA, at.CLIP, at.GAP]] = reliability.dc_lambda, reliability.dc_clip, reliability.gap
        if isinstance(rule, DelayedSGD):
            self._momentum, self._later_share = rule.momentum, rule.later_share
            self._fixed[[at.AT_ONCE, at.LATER]] = rule.at_once, rule.delivered_later
        else:
            self._momentum = self._later_share = rule.beta_1
            self._fixed[[at.AT_ONCE, at.LATER]] = 1.0 - rule.beta_1, rule.beta_1
            self._fixed[[at.BETA_2, at.SECOND_SHARE, at.EPSILON]] = rule.beta_2, 1.0 - rule.beta_2, rule.epsilon

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
        numbers[at.RATE], numbers[at.AHEAD] = own_rate / scale, 1.0 - kept**tau
        if self._adam is not None:
            numbers[at.AHEAD] *= rate / scale
        numbers[at.KEPT], numbers[at.RELEASED] = kept, 1.0 - kept
        numbers[at.SHARE] = factor_share(_OPS, after)
        if self._decay:
            numbers[at.DECAY_RATE] = own_rate * self._decay
            numbers[at.DECAY_AHEAD] = self._later_share * rate * self._decay * updates_ahead(_OPS, kept, tau)
        return numbers, {name: np.float32(value) for name, value in after.items()}
