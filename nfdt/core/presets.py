"""The preset table: every published algorithm is a row of independent parts."""

from __future__ import annotations

from typing import Any

AXES: dict[str, tuple[str, ...]] = {
    "topology": ("flat", "ring"),
    "consistency": ("bsp", "free", "ssp", "softsync"),
    "update_rule": ("plain", "staleness-scaled", "dc", "dc-a", "dc-k", "ddc"),
    "batch": ("fixed",),
    "tasks": ("static", "dynamic"),
    "codec": ("identity",),
}

_FLAT: dict[str, Any] = {
    "topology": "flat",
    "consistency": "free",
    "update_rule": "plain",
    "batch": "fixed",
    "tasks": "dynamic",
    "overlap": 0,
    "codec": "identity",
}

PRESETS: dict[str, dict[str, Any]] = {
    "bsp": {**_FLAT, "consistency": "bsp", "tasks": "static"},
    "ssp": {**_FLAT, "consistency": "ssp"},
    "n-softsync": {**_FLAT, "consistency": "softsync", "update_rule": "staleness-scaled"},
    "asgd": {**_FLAT},
    "dc-asgd": {**_FLAT, "update_rule": "dc"},
    "dc-asgd-a": {**_FLAT, "update_rule": "dc-a"},
    "dc-asgd-k": {**_FLAT, "update_rule": "dc-k"},
    "ddc-asgd": {**_FLAT, "update_rule": "ddc"},
    "allreduce": {**_FLAT, "topology": "ring", "consistency": "bsp", "tasks": "static"},
}

DEFAULT_PRESET = "ddc-asgd"

# Rows of the design whose parts are not all built yet: asked for, they get an answer of their own.
PLANNED: tuple[str, ...] = ("dbs-sgd", "h-ps", "group-sync", "auto")
