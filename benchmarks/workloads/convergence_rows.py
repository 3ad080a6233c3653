"""Rows of the convergence benchmark and of docs/convergence.md: presets, some with modified options."""

from __future__ import annotations

from typing import Any

SEQUENTIAL = "sequential"
# Preset and options of each row; the asynchronous ones last.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    SEQUENTIAL: ("bsp", {}),
    "ddc-asgd": ("ddc-asgd", {}),
    "ddc-asgd-gap1": ("ddc-asgd", {"gap": 1.0}),
    "asgd": ("asgd", {}),
    "staleness-scaled": ("asgd", {"update_rule": "staleness-scaled"}),
    "dc-asgd": ("dc-asgd", {}),
    "dc-asgd-a": ("dc-asgd-a", {}),
    "dc-asgd-k": ("dc-asgd-k", {}),
    "bsp": ("bsp", {}),
    "n-softsync": ("n-softsync", {}),
    "dbs-sgd": ("dbs-sgd", {}),
    "group-sync": ("group-sync", {}),
    "h-ps": ("h-ps", {}),
}
MAIN = ("ddc-asgd", "asgd", "staleness-scaled", "dc-asgd", "dc-asgd-a", "dc-asgd-k", "bsp")
