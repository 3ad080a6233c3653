"""Axes of an algorithm: properties of each choice, and the preset table of published algorithms.

Every published algorithm is a preset of independent choices. The properties are for packages without access to the
policies; those of ``nfdt.consistency`` and ``nfdt.schedulers`` read these tables too: each is defined once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConsistencyFacts:
    """Properties of a consistency policy.

    Attributes:
        synchronous: Whether workers train in rounds; an update consists of one part from each.
        merges: Whether gradients are averaged on arrival, without rounds.
        bounded: Whether fast workers wait for slow ones.
        waiters_alike: Whether all waiting workers may continue at the same time, or none.
        rows_allowed: Whether gradients of embeddings may be sent as rows, because every push is applied unmodified.
    """

    synchronous: bool = False
    merges: bool = False
    bounded: bool = False
    waiters_alike: bool = True
    rows_allowed: bool = True

    @property
    def independent(self) -> bool:
        """Whether no worker waits for another and every gradient is an update."""
        return not (self.synchronous or self.merges or self.bounded)


@dataclass(frozen=True)
class BatchFacts:
    """Properties of a batch policy.

    Attributes:
        follows_speed: Whether local batches grow and shrink with the speed of their workers.
    """

    follows_speed: bool = False

    def rate_of(self, share: float) -> float:
        """Return the factor of the learning rate for a gradient of ``share`` times the reference batch."""
        return share if self.follows_speed else 1.0


@dataclass(frozen=True)
class ExchangeFacts:
    """Properties of what workers exchange.

    Attributes:
        local: Whether the user's optimizer steps on the workers, which push what several steps have changed.
    """

    local: bool = False


@dataclass(frozen=True)
class TopologyFacts:
    """Properties of a topology.

    Attributes:
        allreduce: Whether all workers are ranks of one world, which averages gradients without pushes to shards.
        grouped: Whether workers form several worlds, each of which pushes as one worker.
    """

    allreduce: bool = False
    grouped: bool = False

    @property
    def flat(self) -> bool:
        """Whether every worker pushes by itself."""
        return not (self.allreduce or self.grouped)


@dataclass(frozen=True)
class CodecFacts:
    """Properties of a codec.

    Attributes:
        encodes: Whether values are sent in another form than float32.
        adaptive: Whether one of the other codecs is chosen for each direction while the job runs.
        reply: Default codec of the replies; None: the same codec.
    """

    encodes: bool = True
    adaptive: bool = False
    reply: str | None = None


@dataclass(frozen=True)
class RuleFacts:
    """Properties of an update rule.

    Attributes:
        modelled: Whether the planner's cost model describes how many more samples the rule needs under a delay.
        backups: Whether a shard keeps the weights on which each worker computes.
        state: Vectors of the model that the rule keeps on a shard, besides the optimizer's variables.
        worker_state: Vectors of the model that it keeps there for each worker, besides its backup.
        reserve: Whether it holds the momentum of the optimizer itself, also of an optimizer without momentum.
        differences: Whether it can apply what several steps of a worker have changed.
        neutral: Whether it leaves gradients as they are, so that those of a round may be merged first.
    """

    modelled: bool = False
    backups: bool = False
    state: float = 0.0
    worker_state: float = 0.0
    reserve: bool = False
    differences: bool = False
    neutral: bool = False


CONSISTENCY_FACTS: dict[str, ConsistencyFacts] = {
    "bsp": ConsistencyFacts(synchronous=True),
    "free": ConsistencyFacts(),
    "ssp": ConsistencyFacts(bounded=True, waiters_alike=False),
    "softsync": ConsistencyFacts(merges=True, rows_allowed=False),
}

BATCH_FACTS: dict[str, BatchFacts] = {"fixed": BatchFacts(), "dbs": BatchFacts(follows_speed=True)}

EXCHANGE_FACTS: dict[str, ExchangeFacts] = {
    "every-step": ExchangeFacts(),
    "local-steps": ExchangeFacts(local=True),
}

TOPOLOGY_FACTS: dict[str, TopologyFacts] = {
    "flat": TopologyFacts(),
    "ring": TopologyFacts(allreduce=True),
    "groups": TopologyFacts(grouped=True),
}

CODEC_FACTS: dict[str, CodecFacts] = {
    "identity": CodecFacts(encodes=False),
    "bf16": CodecFacts(),
    "fp16": CodecFacts(),
    "int8": CodecFacts(),
    "int4": CodecFacts(),
    "top-k": CodecFacts(reply="int8"),
    "adaptive": CodecFacts(adaptive=True),
}

RULE_FACTS: dict[str, RuleFacts] = {
    "plain": RuleFacts(differences=True, neutral=True),
    "staleness-scaled": RuleFacts(),
    "dc": RuleFacts(backups=True),
    "dc-a": RuleFacts(backups=True, worker_state=1.0),
    "dc-k": RuleFacts(backups=True, state=1.0),
    "ddc": RuleFacts(
        modelled=True, backups=True, state=3 / 16, reserve=True, differences=True
    ),  # of each block of 16: 3
}


AXES: dict[str, tuple[str, ...]] = {
    "topology": tuple(TOPOLOGY_FACTS),
    "consistency": tuple(CONSISTENCY_FACTS),
    "update_rule": tuple(RULE_FACTS),
    "exchange": tuple(EXCHANGE_FACTS),
    "batch": tuple(BATCH_FACTS),
    "tasks": ("static", "proportional", "dynamic", "finish-together"),
    "codec": tuple(CODEC_FACTS),
}

_FLAT: dict[str, Any] = {
    "topology": "flat",
    "exchange": "every-step",
    "consistency": "free",
    "update_rule": "plain",
    "batch": "fixed",
    "tasks": "dynamic",
    "overlap": 0,
    "codec": "identity",
}

_LOCAL: dict[str, Any] = {**_FLAT, "exchange": "local-steps"}

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
    "local-ddc": {**_LOCAL, "update_rule": "ddc", "overlap": 1, "codec": "adaptive"},
    "diloco": {**_LOCAL, "consistency": "bsp", "outer_momentum": 0.8},
    "group-sync": {**_FLAT, "topology": "groups", "update_rule": "ddc", "batch": "dbs", "tasks": "proportional"},
    "allreduce": {**_FLAT, "topology": "ring", "consistency": "bsp", "tasks": "static"},
}

DEFAULT_PRESET = "ddc-asgd"

FEW_WORKERS = 4
"""Up to this number of workers a shard keeps exact backups, which cost no more: two anchors are alive as a rule, and
one more for workers that are much slower."""
