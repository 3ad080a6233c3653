"""Modes that turn pushes into updates: one file per mode, one mode per store."""

from __future__ import annotations

from functools import partial

from nfdt.consistency import ConsistencyPolicy
from nfdt.shard.modes.asynchronous import AsynchronousMode
from nfdt.shard.modes.base import ModeFactory, PushMode
from nfdt.shard.modes.merged import MergedMode
from nfdt.shard.modes.rounds import RoundMode

__all__ = ["AsynchronousMode", "MergedMode", "ModeFactory", "PushMode", "RoundMode", "mode_for"]


def mode_for(policy: ConsistencyPolicy, workers: int) -> ModeFactory:
    """Return the mode of a job: rounds for a barrier, merged if an update has several gradients, else asynchronous."""
    if policy.facts.synchronous:
        return RoundMode
    count = policy.merge_count(workers)
    return partial(MergedMode, count=count) if count > 1 else AsynchronousMode
