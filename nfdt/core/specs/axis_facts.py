"""Properties of the members of the axes that rooms without access to the policies need: one line per member.

The policies of ``nfdt.consistency`` and ``nfdt.schedulers`` read these tables too: each property is written once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConsistencyFacts:
    """Properties of a consistency policy.

    Attributes:
        synchronous: Workers train in rounds: an update is made of one part from each.
        merges: Gradients are averaged on arrival, without rounds.
        bounded: Fast workers wait for slow ones.
        waiters_alike: Either every waiting worker may go on, or none may.
        rows_allowed: Gradients of embeddings may travel as rows, because every push is applied as it is.
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
        follows_speed: Local batches grow and shrink with the speed of their workers.
    """

    follows_speed: bool = False

    def rate_of(self, share: float) -> float:
        """Factor of the learning rate for a gradient of ``share`` times the reference batch."""
        return share if self.follows_speed else 1.0


@dataclass(frozen=True)
class TopologyFacts:
    """Properties of a topology.

    Attributes:
        allreduce: All workers are ranks of one world, which averages gradients; nothing is pushed to shards.
        grouped: Workers form several worlds, each of which pushes as one worker.
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
        encodes: Values travel in another form than float32.
        adaptive: It stands for a choice among the others, made for each direction while the job runs.
        reply: Codec of the replies where none is named; None: the same.
    """

    encodes: bool = True
    adaptive: bool = False
    reply: str | None = None


@dataclass(frozen=True)
class RuleFacts:
    """Properties of an update rule.

    Attributes:
        modelled: The planner's cost model describes how many more samples the rule needs for a delay.
    """

    modelled: bool = False


CONSISTENCY_FACTS: dict[str, ConsistencyFacts] = {
    "bsp": ConsistencyFacts(synchronous=True),
    "free": ConsistencyFacts(),
    "ssp": ConsistencyFacts(bounded=True, waiters_alike=False),
    "softsync": ConsistencyFacts(merges=True, rows_allowed=False),
}

BATCH_FACTS: dict[str, BatchFacts] = {"fixed": BatchFacts(), "dbs": BatchFacts(follows_speed=True)}

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
    "plain": RuleFacts(),
    "staleness-scaled": RuleFacts(),
    "dc": RuleFacts(),
    "dc-a": RuleFacts(),
    "dc-k": RuleFacts(),
    "ddc": RuleFacts(modelled=True),
}
