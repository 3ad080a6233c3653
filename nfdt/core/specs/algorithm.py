"""Training algorithm: one choice on every axis of the preset table, and the numeric options of its parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nfdt.core.errors import UsageError
from nfdt.core.specs.horovod_options import CODECS
from nfdt.core.specs.presets import (
    AXES,
    BATCH_FACTS,
    CODEC_FACTS,
    CONSISTENCY_FACTS,
    EXCHANGE_FACTS,
    RULE_FACTS,
    TOPOLOGY_FACTS,
    BatchFacts,
    CodecFacts,
    ConsistencyFacts,
    ExchangeFacts,
    RuleFacts,
    TopologyFacts,
)
from nfdt.core.specs.read_with import ReadWith

# Conditions under which options are read; ``find_idle`` reports options that are given without effect.
_DELAYS_COUNT = ReadWith(topology=("flat", "groups"))  # the ranks of a ring push nowhere
_STRENGTH = ReadWith(update_rule=("dc", "dc-a", "dc-k", "ddc"))
_FREE = tuple(name for name, facts in CONSISTENCY_FACTS.items() if facts.independent)
_BY_ROWS = tuple(
    sorted(
        (name for name, facts in CONSISTENCY_FACTS.items() if facts.rows_allowed),
        key=lambda name: CONSISTENCY_FACTS[name].synchronous,
    )
)
_DDC = ReadWith(update_rule=("ddc",))
_MEANS = ReadWith(update_rule=("dc-a", "dc-k"))
_DBS = ReadWith(batch=("dbs",))
_RING = ReadWith(topology=("ring",))
_LOCAL = ReadWith(topology=("flat",), exchange=("local-steps",))
_LOCAL_ROUNDS = ReadWith(topology=("flat",), exchange=("local-steps",), consistency=("bsp",))
MOST_LOCAL_STEPS = 64
"""Limit of local_steps='auto': with more steps apart, workers lose accuracy faster than time is won."""
GROUPS_PATTERN = r"^(auto|\d+|\d+(,\d+)*(;\d+(,\d+)*)+)$"

GroupMembers = tuple[tuple[int, ...], ...]


def explicit_groups(text: str, workers: int) -> GroupMembers | None:
    """Return the members of each group, or None where speeds determine them.

    Args:
        text: ``auto``; a number of groups; or their members: ``0,1;2,3``.
        workers: Number of workers.

    Raises:
        UsageError: there are more groups than workers, or the members are not each worker exactly once.
    """
    if text == "auto":
        return None
    if ";" not in text:
        if not 1 <= int(text) <= workers:
            raise UsageError(f"groups: expected 1 to {workers} groups of {workers} workers. Received: {text}.")
        return (tuple(range(workers)),) if int(text) == 1 else None
    groups = tuple(tuple(sorted(map(int, group.split(",")))) for group in text.split(";"))
    if sorted(member for group in groups for member in group) != list(range(workers)):
        raise UsageError(
            f"groups: expected each of the workers 0 to {workers - 1} in one group, as in '0,1;2,3'. "
            f"Received: {text!r}."
        )
    return groups


def wanted_groups(text: str) -> int | None:
    """Return the requested number of groups; None: determined by speeds."""
    return int(text) if text.isdigit() else None


def _topology_in(info: Any) -> TopologyFacts:
    """Return the properties of the topology, which is validated first; those of flat workers where it is unknown."""
    return TOPOLOGY_FACTS.get(info.data.get("topology"), TopologyFacts())


def _consistency_of(name: str | None) -> ConsistencyFacts:
    """Return the properties of the consistency policy; those of free workers where it is unknown."""
    return CONSISTENCY_FACTS.get(name or "", ConsistencyFacts())


def _codec_of(name: str | None) -> CodecFacts:
    """Return the properties of the codec; those of an encoding codec where it is unknown or not given."""
    return CODEC_FACTS.get(name or "", CodecFacts())


def _one_of(axis: str, value: str) -> str:
    if value not in AXES[axis]:
        raise ValueError(f"expected one of {', '.join(AXES[axis])}")
    return value


class AlgorithmSpec(BaseModel):
    """One choice on every axis, plus the numeric options of the parts. Build it with ``resolve_algorithm``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    topology: str = "flat"
    exchange: Annotated[str, ReadWith(topology=("flat",))] = Field(
        "every-step",
        description="every-step: gradients; local-steps: what local_steps steps of the script's optimizer, on the "
        "worker, have changed",
    )
    consistency: Annotated[str, _DELAYS_COUNT] = "free"
    update_rule: Annotated[str, _DELAYS_COUNT] = "ddc"
    batch: str = "fixed"
    tasks: Annotated[str, _DELAYS_COUNT] = "dynamic"
    overlap: int = Field(
        0, ge=0, le=2, description="pushes that may be unanswered while a worker computes its next gradient"
    )
    plan: Annotated[Literal["nothing", "overlap", "topology"], ReadWith(topology=("flat",), consistency=_FREE)] = Field(
        "nothing",
        description="chosen from measured speeds while the job trains: nothing; overlap (0, or as given); topology "
        "(that, and groups instead of flat workers)",
    )
    codec: str = "identity"
    reply_codec: str | None = Field(
        None, description="codec of the weights that workers receive; None: that of the gradients, int8 for top-k"
    )
    top_k: Annotated[float, ReadWith(codec=("top-k",)), ReadWith(reply_codec=("top-k",))] = Field(
        0.05, gt=0, le=1, description="top-k: the fraction of the elements that is sent"
    )
    error_budget: Annotated[float, ReadWith(codec=("adaptive",))] = Field(
        0.05, gt=0, lt=1, description="adaptive: greatest relative squared error of a codec that may be chosen"
    )
    sparse: Annotated[
        bool | Literal["lazy"], ReadWith(topology=("flat",), consistency=_BY_ROWS, codec=("identity",))
    ] = Field(
        True,
        description="gradients of embeddings travel as rows, where that changes nothing: see how_it_works; lazy: with "
        "Adam as well, whose untouched rows then stay as they are",
    )
    worker_tables_mb: Annotated[
        int, ReadWith(topology=("flat",), consistency=_BY_ROWS, codec=("identity",), sparse=(True, "lazy"))
    ] = Field(
        512,
        ge=0,
        description="MB up to which workers hold the tables of embeddings that travel by rows; larger ones are on the "
        "shards alone, and workers look up the rows of each batch",
    )
    staleness_bound: Annotated[int, ReadWith(consistency=("ssp",))] = Field(
        3, ge=0, description="ssp: how many steps a worker may be ahead of the slowest"
    )
    softsync_n: Annotated[int, ReadWith(consistency=("softsync",))] = Field(
        1, ge=1, description="n-softsync: the n of floor(M / n) gradients per update"
    )
    dc_lambda: Annotated[float | None, _STRENGTH] = Field(
        None, ge=0, description="compensation strength; None: 0.04 (dc), 2 (dc-a, dc-k), 0.2 (ddc), 0.5 (local-steps)"
    )
    dc_clip: Annotated[float, _DDC] = Field(
        1.0, gt=0, description="ddc: the compensation is at most this many times the gradient"
    )
    gap: Annotated[float | None, _DDC] = Field(
        None, ge=0, description="ddc: how strongly drift lowers the trust; 0: not at all; None: 1, 2 (local-steps)"
    )
    batch_min: Annotated[int, _DBS] = Field(1, ge=1, description="dbs: fewest samples of one worker's batch")
    batch_max: Annotated[int | None, _DBS] = Field(
        None, ge=1, description="dbs: most samples of one worker's batch (memory); None: no bound"
    )
    batch_multiple: Annotated[int, ReadWith(topology=("flat",), batch=("dbs",))] = Field(
        1, ge=1, description="dbs: batches are multiples of this, where rows do not end"
    )
    scale_lr: Annotated[Literal["linear", "sqrt"] | None, _RING] = Field(
        None, description="allreduce: multiply the learning rate by the number of ranks, or its square root"
    )
    warmup_epochs: Annotated[float, ReadWith(topology=("ring",), scale_lr=("linear", "sqrt"))] = Field(
        0.0, ge=0, description="allreduce: epochs over which scale_lr rises from 1"
    )
    dc_decay: Annotated[float, _MEANS] = Field(
        0.95, ge=0, lt=1, description="dc-a, dc-k: decay of the mean square of the gradients"
    )

    groups: Annotated[str, ReadWith(topology=("groups",)), ReadWith(plan=("topology",))] = Field(
        "auto", pattern=GROUPS_PATTERN, description="groups: auto, a number of groups, or their members as in '0,1;2,3'"
    )
    local_steps: Annotated[int | Literal["auto"], _LOCAL] = Field(
        16,
        description="local-steps: steps of the fastest worker between two pushes; auto: as many as keep an exchange "
        f"below a tenth of the time, at most {MOST_LOCAL_STEPS}",
    )
    local_rate: Annotated[float, _LOCAL] = Field(
        1.0, gt=0, description="local-steps: factor of the script's learning rate"
    )
    outer_lr: Annotated[float, _LOCAL_ROUNDS] = Field(
        0.7, gt=0, description="local-steps with bsp: learning rate for what is pushed"
    )
    outer_momentum: Annotated[float, _LOCAL_ROUNDS] = Field(
        0.9, ge=0, lt=1, description="local-steps with bsp: Nesterov momentum of what is pushed"
    )

    @property
    def encodes_replies(self) -> bool:
        """Whether replies may contain encoded weight deltas."""
        return CODEC_FACTS[self.codec_of_replies].encodes

    @property
    def rows(self) -> bool | Literal["lazy"]:
        """``sparse``; False where pushes are merged or encoded, or where no worker pushes by itself."""
        plain = not self.codec_facts.encodes and not self.encodes_replies
        able = self.consistency_facts.rows_allowed and self.topology_facts.flat and not self.exchange_facts.local
        return self.sparse if able and plain else False

    @property
    def hides_exchanges(self) -> bool:
        """Whether exchanges are always hidden by computation, so that a shorter one gains nothing.

        A plan hides them only where they stay long, and local steps become fewer where they are short.
        """
        return self.overlap > 0 and self.plan == "nothing" and not self.exchange_facts.local

    @property
    def outer_optimizer(self) -> tuple[float, float] | None:
        """Learning rate and Nesterov momentum with which shards apply the differences of local steps.

        None without local steps; a rule of its own needs neither rate nor momentum.
        """
        if not self.exchange_facts.local:
            return None
        return (self.outer_lr, self.outer_momentum) if self.consistency_facts.synchronous else (1.0, 0.0)

    def with_local_steps(self) -> AlgorithmSpec | None:
        """Return it for flat workers that take local steps; None if the rule cannot apply what these change."""
        if not (self.topology_facts.flat and self.consistency_facts.independent and self.rule_facts.differences):
            return None
        steps = {"exchange": "local-steps", "local_steps": "auto", "overlap": 1}
        return self.model_copy(update={**steps, "plan": "nothing", "batch": "fixed", "tasks": "dynamic"})

    @property
    def exchange_facts(self) -> ExchangeFacts:
        """Properties of what workers exchange."""
        return EXCHANGE_FACTS[self.exchange]

    @property
    def consistency_facts(self) -> ConsistencyFacts:
        """Properties of the consistency policy."""
        return CONSISTENCY_FACTS[self.consistency]

    @property
    def batch_facts(self) -> BatchFacts:
        """Properties of the batch policy."""
        return BATCH_FACTS[self.batch]

    @property
    def rule_facts(self) -> RuleFacts:
        """Properties of the update rule."""
        return RULE_FACTS[self.update_rule]

    @property
    def codec_facts(self) -> CodecFacts:
        """Properties of the codec of gradients."""
        return CODEC_FACTS[self.codec]

    @property
    def codec_of_replies(self) -> str:
        """Name of the codec of the weights that workers receive."""
        return self.reply_codec or self.codec_facts.reply or self.codec

    @property
    def topology_facts(self) -> TopologyFacts:
        """Properties of the topology."""
        return TOPOLOGY_FACTS[self.topology]

    @field_validator("consistency")
    @classmethod
    def _groups_merge_already(cls, value: str, info: Any) -> str:
        if _consistency_of(value).merges and _topology_in(info).grouped:
            raise ValueError("expected 'free', 'ssp' or 'bsp' with groups: what a group pushes is merged already")
        return value

    @field_validator("overlap")
    @classmethod
    def _nothing_overlaps_a_barrier(cls, value: int, info: Any) -> int:
        if value and _topology_in(info).allreduce:
            raise ValueError("expected 0 on a ring: Horovod overlaps its exchange with the computation by itself")
        if value and _topology_in(info).grouped:
            raise ValueError("expected 0 with groups: the members of a group step together")
        if value and _consistency_of(info.data.get("consistency")).synchronous:
            raise ValueError("expected 0 with consistency 'bsp': there every step waits for the step before it")
        return value

    @field_validator("batch")
    @classmethod
    def _ranks_step_together(cls, value: str, info: Any) -> str:
        if BATCH_FACTS.get(value, BatchFacts()).follows_speed and _topology_in(info).allreduce:
            raise ValueError("expected 'fixed' on a ring: its ranks have batches of one size; use algorithm='bsp'")
        return value

    @field_validator("tasks", mode="before")
    @classmethod
    def _leases_are_dynamic(cls, value: Any) -> Any:
        return "dynamic" if value == "leases" else value

    @field_validator("codec", "reply_codec")
    @classmethod
    def _codec_fits(cls, value: str | None, info: Any) -> str | None:
        ring, adaptive = _topology_in(info).allreduce, _codec_of(info.data.get("codec")).adaptive
        if ring and value not in (None, *CODECS):
            raise ValueError(f"expected one of {', '.join(CODECS)} for allreduce, which adds up what travels")
        if info.field_name == "reply_codec" and value is not None:
            if ring:
                raise ValueError("expected none for allreduce, which has no replies")
            if adaptive or _codec_of(value).adaptive:
                raise ValueError("expected none with codec 'adaptive', which is for both directions")
            _one_of("codec", value)
        return value

    @field_validator("groups", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("exchange")
    @classmethod
    def _workers_push_themselves(cls, value: str, info: Any) -> str:
        if EXCHANGE_FACTS.get(value, ExchangeFacts()).local and not _topology_in(info).flat:
            raise ValueError("expected 'every-step', unless topology is 'flat'")
        return value

    @field_validator("local_steps", mode="before")
    @classmethod
    def _at_least_one_step(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("expected 'auto', or at least 1")
        return value

    @model_validator(mode="after")
    def _fits_local_steps(self) -> Self:
        if not self.exchange_facts.local:
            return self
        facts = self.consistency_facts
        if not (facts.independent or facts.synchronous):
            raise ValueError("consistency: expected 'free' or 'bsp' with exchange 'local-steps'")
        if not self.rule_facts.differences or (facts.synchronous and not self.rule_facts.neutral):
            rules = "'plain'" if facts.synchronous else "'ddc' or 'plain'"
            raise ValueError(f"update_rule: expected {rules} with exchange 'local-steps'")
        if self.batch_facts.follows_speed:
            raise ValueError("batch: expected 'fixed' with exchange 'local-steps', which adapts the number of steps")
        if self.plan != "nothing":
            raise ValueError("plan: expected 'nothing' with exchange 'local-steps'")
        return self

    @field_validator("topology", "exchange", "consistency", "update_rule", "batch", "tasks", "codec")
    @classmethod
    def _known_choice(cls, value: str, info: Any) -> str:
        return _one_of(info.field_name, value)
