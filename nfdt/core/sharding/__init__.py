"""Division of a program among its shards: parameters, optimizer variables and state. No Keras here."""

from __future__ import annotations

from nfdt.core.sharding.plan import (
    GLOBAL,
    OptimizerSlot,
    ShardPlan,
    count_shards,
    held_by_workers,
    make_plan,
    sparse_tables,
    tables_on_shards,
    why_uncuttable,
)

__all__ = [
    "GLOBAL",
    "OptimizerSlot",
    "ShardPlan",
    "count_shards",
    "held_by_workers",
    "make_plan",
    "sparse_tables",
    "tables_on_shards",
    "why_uncuttable",
]
