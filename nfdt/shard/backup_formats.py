"""What a shard keeps of the weights it sends: as little as its update rule and its workers' codecs need.

The record is what the worker holds, bit for bit: what is sent is what the record stands for. Three kinds::

    none    the rule does not ask what a gradient was computed on                                   0 bytes per weight
    exact   the weights; answers may then be differences to what a worker holds                     4
    half    a bfloat16 difference to an *anchor*, weights of some versions ago that many share      2

A half is off from the weights it stands for by a 256th of what they have moved since the anchor at most, which is far
less than one step; half precision of the weights themselves would be off by more than a small step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.shard.engine import Engine
from nfdt.shard.tensors import Half, Vector
from nfdt.update_rules import UpdateRule

Kind = Literal["none", "exact", "half"]

FEW_WORKERS = 4
"""So many cost no more with exact records: two anchors are alive as a rule, one more for workers much slower."""

ANCHOR_ANSWERS = 4
"""Answers per worker until there is a new anchor."""


def kind_for(rule: UpdateRule, algorithm: AlgorithmSpec, workers: int) -> Kind:
    """What a shard of a job keeps."""
    if algorithm.encodes_replies:
        return "exact"
    if not rule.uses_backup:
        return "none"
    return "half" if workers > FEW_WORKERS else "exact"


class Recorder:
    """Makes the records of one shard. Used under the store's lock.

    Args:
        kind: Of all of them.
        engine: The shard's.
    """

    def __init__(self, kind: Kind, engine: Engine) -> None:
        self.kind = kind
        self._engine = engine
        self._anchor: Any = None
        self._answers = 0
        self._zeros: Any = None

    def anchor(self, snapshot: Callable[[], Vector], workers: int) -> Any:
        """What the next answer shall be a difference to, the weights as they are from time to time; None: nothing."""
        if self.kind != "half":
            return None
        if self._anchor is None or self._answers >= ANCHOR_ANSWERS * workers:
            self._anchor, self._answers = snapshot(), 0
        self._answers += 1
        return self._anchor

    def renew(self) -> None:
        """The weights have moved far: the next answer is no difference to an old anchor."""
        self._anchor = None

    def of(self, weights: Vector | Half) -> Any:
        """The record of weights that are sent, None for none."""
        if self.kind == "none":
            return None
        if self.kind == "exact" or isinstance(weights, Half):
            return weights
        if self._zeros is None:
            self._zeros = self._engine.no_difference()
        return Half(weights, self._zeros)
