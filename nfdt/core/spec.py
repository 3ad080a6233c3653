"""What a job is: frozen specifications, validated once, equal on client, server, shard and worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nfdt.core.errors import UsageError
from nfdt.core.presets import AXES, DEFAULT_PRESET, PLANNED, PRESETS

MAX_WORKERS = 4096
MAX_SHARDS = 256


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _one_of(axis: str, value: str) -> str:
    if value not in AXES[axis]:
        raise ValueError(f"expected one of {', '.join(AXES[axis])}")
    return value


class AlgorithmSpec(_Spec):
    """One choice on every axis, plus the numbers the parts take. Build it with :func:`resolve_algorithm`."""

    name: str
    topology: str = "flat"
    consistency: str = "free"
    update_rule: str = "ddc"
    batch: str = "fixed"
    tasks: str = "dynamic"
    overlap: int = Field(0, ge=0, le=0)
    codec: str = "identity"
    staleness_bound: int = Field(3, ge=0, description="ssp: how many steps a worker may be ahead of the slowest")
    softsync_n: int = Field(1, ge=1, description="n-softsync: the n of floor(M / n) gradients per update")
    dc_lambda: float | None = Field(
        None, ge=0, description="compensation strength; None: 0.04 (dc), 2 (dc-a, dc-k), 30 (ddc)"
    )
    dc_clip: float = Field(1.0, gt=0, description="ddc: the compensation is at most this many times the gradient")
    gap: float | None = Field(
        None, ge=0, description="ddc: how strongly drift lowers the trust in a gradient; None: 0.5 (SGD), 1 (others)"
    )
    scale_lr: Literal["linear", "sqrt"] | None = Field(
        None, description="allreduce: multiply the learning rate by the number of ranks, or its square root"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="allreduce: epochs over which scale_lr rises from 1")
    dc_decay: float = Field(0.95, ge=0, lt=1, description="dc-a, dc-k, ddc: decay of the mean square of the gradients")

    @field_validator("topology", "consistency", "update_rule", "batch", "tasks", "codec")
    @classmethod
    def _known_choice(cls, value: str, info: Any) -> str:
        return _one_of(info.field_name, value)


class Emulation(_Spec):
    """Make one machine behave like several unequal ones. Empty: no emulation."""

    slowdown: tuple[float, ...] = Field((), description="worker i computes slowdown[i] times slower")
    step_ms: tuple[float, ...] = Field((), description="worker i takes at least step_ms[i] per step")
    fail: str | None = Field(
        None, pattern=r"^\d+@\d+(,\d+@\d+)*$", description="'2@30': worker 2 is killed at its step 30"
    )


class ClusterSpec(_Spec):
    """How many workers and shards a job gets."""

    workers: int = Field(2, ge=1, le=MAX_WORKERS)
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    launcher: Literal["auto", "mpirun", "horovodrun", "world"] = Field(
        "auto", description="allreduce: what starts the ranks; auto: mpirun where it exists"
    )
    hosts: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]*(:\d+)?(,[A-Za-z0-9][\w.-]*(:\d+)?)*$",
        description="allreduce: 'a:2,b:2', hosts and how many ranks each takes",
    )
    hostfile: str | None = Field(None, pattern=r"^[^-]", description="allreduce: a file that the launcher reads")
    emulate: Emulation = Emulation()


class FitSpec(_Spec):
    """The arguments of ``fit`` that decide what is trained, in Keras' meaning."""

    epochs: int = Field(ge=0)
    initial_epoch: int = Field(0, ge=0)
    batch_size: int = Field(32, ge=1, description="local batch of one worker, in samples")
    shuffle: bool = True
    seed: int = Field(0, ge=0, lt=2**63, description="of the sample order")
    steps_per_epoch: int | None = Field(None, ge=1)
    validation_freq: tuple[int, ...] | int = 1
    validation_batch_size: int | None = Field(None, ge=1)
    validation_steps: int | None = Field(None, ge=1)


class DataSpec(_Spec):
    """Where samples come from: arrays in the artifact store, or batches fed by the client.

    ``structure`` is the nest of (x, y, sample_weight) as JSON: lists, dicts, nulls and, in place of
    each array, its index in ``arrays``; see :mod:`nfdt.core.training.data`.
    """

    kind: Literal["arrays", "stream"]
    structure: Any = None
    arrays: tuple[str, ...] = Field((), description="artifact name (sha256) of the .npy file of each array")
    samples: int | None = Field(None, ge=1, description="rows of every array; None for a stream")
    batches: int | None = Field(None, ge=1, description="batches per epoch of a stream, where it is known")


class JobSpec(_Spec):
    """Everything a job server needs to train; arrays and program are artifacts named by their sha256."""

    name: str = Field("job", max_length=200)
    program: str = Field(pattern=r"^[0-9a-f]{64}$", description="artifact of the program's JSON")
    artifacts: tuple[str, ...] = Field((), description="all artifacts the job needs, the program included")
    code: bool = Field(False, description="the program carries pickled code: needs a server with --allow-code")
    algorithm: AlgorithmSpec
    cluster: ClusterSpec = ClusterSpec()
    fit: FitSpec
    train: DataSpec
    validation: DataSpec | None = None
    attended: bool = Field(True, description="a client runs the callbacks at each epoch's end")
    versions: dict[str, str] = Field(default_factory=dict, description="python, keras, tensorflow of the client")
    step_timeout_s: float = Field(600.0, gt=0, description="a worker silent this long is given up")
    start_timeout_s: float = Field(120.0, gt=0, description="how long to wait for the asked number of workers")


CLUSTER_OPTIONS = tuple(k for k in ClusterSpec.model_fields if k != "emulate")
_ALGORITHM_OPTIONS = tuple(k for k in AlgorithmSpec.model_fields if k != "name")
OVERRIDES: tuple[str, ...] = (*_ALGORITHM_OPTIONS, *CLUSTER_OPTIONS, "emulate")


def _explain(error: ValidationError, received: Mapping[str, Any]) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {reason}. Received: {item.get('input', received)!r}.")
    return " ".join(parts)


def check_names(options: Mapping[str, Any], valid: tuple[str, ...] = OVERRIDES) -> None:
    """Raise UsageError for the first option that is not in ``valid``, naming the valid ones."""
    for name in options:
        if name not in valid:
            raise UsageError(f"Unknown option {name!r}. Expected one of: {', '.join(sorted(valid))}.")


def resolve_algorithm(name: str | None = None, **overrides: Any) -> AlgorithmSpec:
    """The preset ``name`` (default ``ddc-asgd``) with some axes or numbers overridden.

    Raises:
        UsageError: unknown preset, unknown option or bad value; the message names the valid ones.
    """
    name = name or DEFAULT_PRESET
    if name in PLANNED:
        raise UsageError(f"algorithm={name!r} is not available yet. Expected one of: {', '.join(PRESETS)}.")
    if name not in PRESETS:
        raise UsageError(f"Unknown algorithm {name!r}. Expected one of: {', '.join(PRESETS)}.")
    check_names(overrides, _ALGORITHM_OPTIONS)
    given = {k: v for k, v in overrides.items() if v is not None}
    try:
        return AlgorithmSpec(name=name, **{**PRESETS[name], **given})
    except ValidationError as error:
        raise UsageError(f"algorithm {name!r}: {_explain(error, given)}") from None


def resolve_cluster(**options: Any) -> ClusterSpec:
    """A ClusterSpec from ``workers``, ``shards``, how ranks are launched, and ``emulate`` (a mapping).

    Raises:
        UsageError: unknown option or bad value.
    """
    check_names(options, (*CLUSTER_OPTIONS, "emulate"))
    given = {k: v for k, v in options.items() if v is not None}
    try:
        return ClusterSpec(**given)
    except ValidationError as error:
        raise UsageError(_explain(error, given)) from None


def parse_job(text: str | bytes) -> JobSpec:
    """A JobSpec from JSON that came over the network.

    Raises:
        UsageError: not JSON, unknown fields or values out of range.
    """
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"Job specification refused: {_explain(error, {})}") from None
