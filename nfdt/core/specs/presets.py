"""The preset table: every published algorithm is a preset of independent parts."""

from __future__ import annotations

from typing import Any

AXES: dict[str, tuple[str, ...]] = {
    "topology": ("flat", "ring", "groups"),
    "consistency": ("bsp", "free", "ssp", "softsync"),
    "update_rule": ("plain", "staleness-scaled", "dc", "dc-a", "dc-k", "ddc"),
    "batch": ("fixed", "dbs"),
    "tasks": ("static", "proportional", "dynamic", "finish-together"),
    "codec": ("identity", "bf16", "fp16", "int8", "int4", "top-k", "adaptive"),
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

_HPS: dict[str, Any] = {**_FLAT, "tasks": "finish-together", "overlap": 1, "plan": "overlap", "codec": "adaptive"}

PRESETS: dict[str, dict[str, Any]] = {
    "bsp": {**_FLAT, "consistency": "bsp", "tasks": "static"},
    "ssp": {**_FLAT, "consistency": "ssp"},
    "n-softsync": {**_FLAT, "consistency": "softsync", "update_rule": "staleness-scaled"},
    "asgd": {**_FLAT},
    "dc-asgd": {**_FLAT, "update_rule": "dc"},
    "dc-asgd-a": {**_FLAT, "update_rule": "dc-a"},
    "dc-asgd-k": {**_FLAT, "update_rule": "dc-k"},
    "ddc-asgd": {**_FLAT, "update_rule": "ddc"},
    "dbs-sgd": {**_FLAT, "batch": "dbs"},
    "h-ps": {**_HPS},
    "auto": {**_HPS, "update_rule": "ddc", "batch": "dbs", "plan": "topology"},
    "group-sync": {**_FLAT, "topology": "groups", "update_rule": "ddc", "batch": "dbs", "tasks": "proportional"},
    "allreduce": {**_FLAT, "topology": "ring", "consistency": "bsp", "tasks": "static"},
}

DEFAULT_PRESET = "ddc-asgd"
