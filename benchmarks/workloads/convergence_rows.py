"""Rows of the convergence study and of docs/convergence.md: presets, some with modified options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import resolve_algorithm

SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class StudyRow:
    """A row.

    Attributes:
        preset: Name of the preset.
        options: Options of the algorithm.
        scales_rate: Whether the learning rate is multiplied by the number of batches that an update merges.
    """

    preset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scales_rate: bool = False

    @property
    def algorithm(self) -> AlgorithmSpec:
        """The algorithm."""
        return resolve_algorithm(self.preset, **self.options)

    def rate(self, rate: float, workers: int) -> float:
        """Return the learning rate of the model from that of one machine.

        The strong synchronous form scales it linearly with the larger batch, and every training warms it up.

        References:
            Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, sections 2.1 and 2.2.
        """
        return rate * batches_per_update(self.algorithm, workers) if self.scales_rate else rate


ROWS: dict[str, StudyRow] = {
    SEQUENTIAL: StudyRow("bsp"),
    "ddc-asgd": StudyRow("ddc-asgd"),
    "ddc-elementwise": StudyRow("asgd", {"update_rule": "ddc-elementwise"}),
    "dana-dc": StudyRow("asgd", {"update_rule": "dana-dc"}),
    "asgd": StudyRow("asgd"),
    "staleness-scaled": StudyRow("asgd", {"update_rule": "staleness-scaled"}),
    "dc-asgd": StudyRow("dc-asgd"),
    "dc-asgd-a": StudyRow("dc-asgd-a"),
    "dc-asgd-k": StudyRow("dc-asgd-k"),
    "auto": StudyRow("auto"),
    "h-ps": StudyRow("h-ps"),
    "dbs-sgd": StudyRow("dbs-sgd"),
    "group-sync": StudyRow("group-sync"),
    "n-softsync": StudyRow("n-softsync"),
    "bsp": StudyRow("bsp"),
    "sync-scaled": StudyRow("bsp", scales_rate=True),
    "local-ddc-hidden": StudyRow("local-ddc", {"codec": "identity"}),
    "local-ddc-rate": StudyRow("local-ddc", {"codec": "identity", "overlap": 0, "local_rate": 1.5}),
    "ddc-finish-together": StudyRow("ddc-asgd", {"tasks": "finish-together"}),
    "ddc-overlap": StudyRow("ddc-asgd", {"overlap": 1}),
    "ddc-adaptive": StudyRow("ddc-asgd", {"codec": "adaptive"}),
    "group-sync-fixed": StudyRow("group-sync", {"batch": "fixed"}),
    "ssp": StudyRow("ssp"),
    "allreduce": StudyRow("allreduce"),
}
_SHOWN = {"codec": "identity", "overlap": 0}  # as links cost nothing
LOCAL_ROWS: dict[str, StudyRow] = {
    "local-ddc": StudyRow("local-ddc", _SHOWN),
    "diloco": StudyRow("diloco"),
    "local-average": StudyRow("local-ddc", {**_SHOWN, "update_rule": "plain"}),
    **{
        rule: StudyRow("local-ddc", {**_SHOWN, "update_rule": rule})
        for rule in ("local-nesterov", "delayed-nesterov", "momentum-look-ahead", "heloco")
    },
}
"""Rules of local steps; with 16 steps, and as ``NAME/4`` and ``NAME/64`` with others."""
ROWS |= LOCAL_ROWS
ROWS |= {
    f"{name}/{steps}": replace(row, options={**row.options, "local_steps": steps})
    for name, row in LOCAL_ROWS.items()
    for steps in (4, 64)
}
MAIN = (SEQUENTIAL, "ddc-asgd", "asgd", "staleness-scaled", "dc-asgd", "dc-asgd-a", "dc-asgd-k", "bsp", "sync-scaled")


def batches_per_update(algorithm: AlgorithmSpec, workers: int) -> float:
    """Return the approximate number of local batches per step of an optimizer: the length of a schedule follows."""
    if algorithm.exchange_facts.local:
        return 1.0  # a schedule follows the samples
    if algorithm.consistency == "bsp":
        return workers
    if algorithm.consistency == "softsync":
        return max(1, workers // algorithm.softsync_n)
    return workers / 3 if algorithm.topology == "groups" else 1.0
