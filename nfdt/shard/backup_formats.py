"""Formats of backups: as small as the update rule and the workers' codecs allow.

A backup equals the weights that the worker holds, bit for bit: a shard sends the decoded backup. Three formats::

    none      nothing: the rule does not use the weights that a gradient was computed on           0 bytes per weight
    exact     the weights; replies may then be deltas to the weights that a worker holds          4
    anchored  a bfloat16 difference to an *anchor*, an older snapshot that many backups share     2

An anchored backup differs from the weights it represents by at most 1/256 of their distance to the anchor, which is
far less than one step. Weights in half precision would differ by more than a small step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.shard.engine import AnchoredBf16, Engine, ReplyWeights, Vector
from nfdt.update_rules import UpdateRule

FEW_WORKERS = 4
"""Up to this number of workers exact backups cost no more: two anchors are alive as a rule, and one more for workers
that are much slower."""

REPLIES_PER_ANCHOR = 4
"""Replies per worker until the anchor is renewed."""


class BackupFormat(Protocol):
    """Format of the backups of one shard. Used under the store's lock."""

    @property
    def has_deltas(self) -> bool:
        """Whether a reply may be a delta to a backup."""
        ...

    def anchor(self, snapshot: Callable[[], Vector], workers: int) -> Vector | None:
        """Return the anchor of the next reply, or None for a reply without anchor.

        Args:
            snapshot: Returns the current weights, for a new anchor.
            workers: Number of workers that have backups.
        """
        ...

    def renew_anchor(self) -> None:
        """Take a new anchor for the next reply, because the weights have changed a lot."""
        ...

    def encode(self, reply: ReplyWeights) -> Any:
        """Return the backup of weights that are sent: a vector, an :class:`AnchoredBf16`, or None."""
        ...


class NoBackup:
    """Format without backups; see :class:`BackupFormat` for the methods."""

    has_deltas = False

    def __init__(self, engine: Engine) -> None:
        pass

    def anchor(self, snapshot: Callable[[], Vector], workers: int) -> Vector | None:
        """Return None."""
        return None

    def renew_anchor(self) -> None:
        """Do nothing."""

    def encode(self, reply: ReplyWeights) -> Any:
        """Return None."""
        return None


class ExactBackup(NoBackup):
    """Format that keeps the weights themselves."""

    has_deltas = True

    def encode(self, reply: ReplyWeights) -> Any:
        """Return the weights."""
        return reply.weights


class AnchoredBackup:
    """Format that keeps differences to an anchor, a snapshot of the weights that is renewed periodically."""

    has_deltas = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._anchor: Any = None
        self._replies = 0  # with this anchor
        self._zeros: Any = None

    def anchor(self, snapshot: Callable[[], Vector], workers: int) -> Vector | None:
        """See ``BackupFormat``."""
        if self._anchor is None or self._replies >= REPLIES_PER_ANCHOR * workers:
            self._anchor, self._replies = snapshot(), 0
        self._replies += 1
        return self._anchor

    def renew_anchor(self) -> None:
        """See ``BackupFormat``."""
        self._anchor = None

    def encode(self, reply: ReplyWeights) -> Any:
        """See ``BackupFormat``; weights sent without an anchor become their own anchor."""
        if reply.compressed is not None:
            return reply.compressed
        if self._zeros is None:
            self._zeros = self._engine.no_difference()
        return AnchoredBf16(reply.weights, self._zeros)


BACKUP_FORMATS: dict[str, Callable[[Engine], BackupFormat]] = {
    "none": NoBackup,
    "exact": ExactBackup,
    "anchored": AnchoredBackup,
}


def format_for(rule: UpdateRule, algorithm: AlgorithmSpec, workers: int) -> str:
    """Return the name of the format for the shards of a job."""
    if algorithm.encodes_replies:
        return "exact"
    if not rule.uses_backup:
        return "none"
    return "anchored" if workers > FEW_WORKERS else "exact"
