"""The preset table: every published algorithm is a preset of independent parts."""

from __future__ import annotations

from typing import Any

from nfdt.core.specs.axis_facts import BATCH_FACTS, CODEC_FACTS, CONSISTENCY_FACTS, RULE_FACTS, TOPOLOGY_FACTS

AXES: dict[str, tuple[str, ...]] = {
    "topology": tuple(TOPOLOGY_FACTS),
    "consistency": tuple(CONSISTENCY_FACTS),
    "update_rule": tuple(RULE_FACTS),
    "batch": tuple(BATCH_FACTS),
    "tasks": ("static", "proportional", "dynamic", "finish-together"),
    "codec": tuple(CODEC_FACTS),
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

_HPS: dict[str, Any] = {
    **_FLAT,
    "update_rule": "ddc",
    "tasks": "finish-together",
    "overlap": 1,
    "plan": "overlap",
    "codec": "adaptive",
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
    "dbs-sgd": {**_FLAT, "batch": "dbs"},
    "h-ps": {**_HPS},
    "auto": {**_HPS, "batch": "dbs", "plan": "topology"},
    "group-sync": {**_FLAT, "topology": "groups", "update_rule": "ddc", "batch": "dbs", "tasks": "proportional"},
    "allreduce": {**_FLAT, "topology": "ring", "consistency": "bsp", "tasks": "static"},
}

DEFAULT_PRESET = "ddc-asgd"
