"""Frozen specifications of a job, validated once, equal on client, server, shard and worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nfdt.core.errors import UsageError, similar
from nfdt.core.order import RowNumbers, keras_order, sample_order
from nfdt.core.specs.algorithm import AlgorithmSpec, explicit_groups
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.specs.emulation import Emulation
from nfdt.core.specs.horovod_options import ANY_WORLD, LATER_WORLDS, RING, RingElastic, RingTuning
from nfdt.core.specs.presets import DEFAULT_PRESET, PRESETS
from nfdt.core.specs.read_with import ReadWith, why_idle

FLAT = ReadWith(topology=("flat",))
MAX_WORKERS = 16_384
MAX_SHARDS = 256
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"  # no control sequences for terminals that list jobs


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterSpec(RingTuning, RingElastic):
    """Numbers of workers and shards of a job, and their placement."""

    workers: int = Field(2, ge=1, le=MAX_WORKERS)
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    devices_per_worker: Annotated[int | Literal["all"] | None, FLAT] = Field(
        None,
        description="GPUs among which a worker divides each batch; all: those of its slot; none given: the same, and "
        "of a processor one",
    )
    launcher: Annotated[Literal["auto", "slots", "mpirun", "horovodrun", "world"], ANY_WORLD, LATER_WORLDS] = Field(
        "auto", description="allreduce: what starts the ranks; auto: slots on a shared server, else mpirun if it exists"
    )
    hosts: Annotated[str | None, RING] = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]*(:\d+)?(,[A-Za-z0-9][\w.-]*(:\d+)?)*$",
        description="allreduce: 'a:2,b:2', hosts and how many ranks each takes",
    )
    hostfile: Annotated[str | None, RING] = Field(
        None, pattern=r"^[^-]", description="allreduce: a file that the launcher reads"
    )
    fetch_whole_mb: int = Field(
        256,
        ge=1,
        le=2**20,
        description="a worker on another machine fetches larger arrays row by row, and keeps so much",
    )
    snapshot_s: float = Field(
        10.0, ge=0.1, le=86400, description="seconds between two snapshots of the shards, from which lost ones go on"
    )
    heartbeat_s: float = Field(
        2.0,
        ge=0.1,
        le=3600,
        description="seconds between two signs of life of a worker; nobody waits for an overdue one",
    )
    lost_s: float = Field(
        8.0, ge=0.4, le=86400, description="a slot without a sign of life for so many seconds is lost to the job"
    )
    epoch_overlap: bool = Field(
        True,
        description="workers train the next epoch while the last one is validated and callbacks run; what a callback "
        "changes makes the job repeat that",
    )
    emulate: Emulation = Emulation()

    @field_validator("devices_per_worker")
    @classmethod
    def _at_least_one_device(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError("expected 'all', or at least 1")
        return value

    @model_validator(mode="after")
    def _lost_later(self) -> Self:
        if self.lost_s < 2 * self.heartbeat_s:
            raise ValueError(f"lost_s: expected at least two intervals of heartbeat_s={self.heartbeat_s:g}")
        return self

    @model_validator(mode="after")
    def _in_between(self) -> Self:
        least, most = self.min_workers or 1, self.max_workers or self.workers
        if self.elastic and not least <= self.workers <= most:
            raise ValueError(f"workers: expected min_workers={least} <= workers <= max_workers={most}")
        return self


class EpochProgress(_Spec):
    """The part of an epoch whose updates a state contains already.

    ``rows`` are (pass, begin, end) of the sample order of each pass, sorted and disjoint; ``samples`` is their number.
    ``round`` is the newest round of the job in the state, 0 in a job without rounds. ``records`` is the artifact with
    the records of the shards, which belongs to the state; "" for none. ``partly`` are the tasks that some of the shards
    have applied: (task, pass, begin, end), not in ``rows``. ``task`` is above the numbers of all earlier tasks.
    """

    epoch: int = Field(ge=0)
    samples: int = Field(0, ge=0)
    round: int = Field(0, ge=0)
    records: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    rows: tuple[tuple[int, int, int], ...] = ()
    partly: tuple[tuple[int, int, int, int], ...] = ()
    task: int = Field(0, ge=0)


class SpeedForecast(_Spec):
    """Speed that ``nfdt plan`` has predicted for a job."""

    samples_per_s: float = Field(gt=0, allow_inf_nan=False, description="samples per second of all workers")
    staleness: float = Field(0.0, ge=0, allow_inf_nan=False, description="mean updates that a gradient misses")
    speed_up: float | None = Field(None, gt=0, allow_inf_nan=False, description="speed divided by that of one machine")


class FitSpec(_Spec):
    """The arguments of ``fit`` that determine the training, with Keras' meaning."""

    epochs: int = Field(ge=0)
    initial_epoch: int = Field(0, ge=0)
    batch_size: int = Field(32, ge=1, description="local batch of one worker, in samples")
    shuffle: bool = True
    seed: int = Field(0, ge=0, lt=2**63, description="of the sample order")
    block: int | None = Field(
        None, ge=1, description="rows that Keras' shuffle permutes at a time, alike in every pass; None: each pass anew"
    )
    steps_per_epoch: int | None = Field(None, ge=1)
    validation_freq: tuple[int, ...] | int = 1
    validation_batch_size: int | None = Field(None, ge=1)
    validation_steps: int | None = Field(None, ge=1)
    updates: int = Field(
        0, description="local-steps: updates of the optimizer before pass 0 of the data, if it had one"
    )
    begun: EpochProgress | None = Field(None, description="restarted job: what is trained of the first epoch")
    trained: dict[str, int] = Field({}, description="restarted job: samples that its state contains, by worker")


class DataSpec(_Spec):
    """Source of the samples, and the place where they are read.

    =========  =============  =========================================================================
    kind       where          fields
    =========  =============  =========================================================================
    arrays     server arrays  ``structure``, ``arrays``, ``samples``; a task is a range of rows
    indexed    workers        ``code``, ``arrays``, ``batches``: a pickled PyDataset; a task is an index
    dataset    workers        ``code``, ``arrays``, ``rows``, ``split``, ``batches``: the graph of a tf.data
                              pipeline; a task is the next batch of its worker
    stream     client         ``batches``: batches streamed by the client
    =========  =============  =========================================================================

    ``structure`` is the pytree of (x, y, sample_weight) as JSON: lists, dicts, nulls and, in place of
    each array, its index in ``arrays``; see :mod:`nfdt.model.training.data`.
    """

    kind: Literal["arrays", "indexed", "dataset", "stream"]
    structure: Any = None
    arrays: tuple[str, ...] = Field((), description="artifact name (sha256) of the .npy file of each array")
    samples: int | None = Field(None, ge=1, description="rows of every array; None for other kinds")
    batches: int | None = Field(None, ge=1, description="batches per epoch, where they are known; None for arrays")
    code: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="artifact of the source that the workers load and read themselves"
    )
    rows: int | None = Field(None, ge=1, description="rows of a dataset's source, which the workers share")
    split: int = Field(1, ge=1, description="rows of a dataset that a worker takes at a time")
    reason: str = Field("", max_length=1000, description="why the data are read where they are")

    @property
    def where(self) -> str:
        """Place where the samples are read: ``server arrays``, ``workers`` or ``client``."""
        return {"arrays": "server arrays", "stream": "client"}.get(self.kind, "workers")

    @property
    def planned(self) -> int | None:
        """Number of rows of the coordinator's plan: samples of arrays, or batches by index; None without a plan."""
        return {"arrays": self.samples, "indexed": self.batches}.get(self.kind)

    @property
    def sized(self) -> bool:
        """Whether the coordinator decides the size of each batch; other sources make whole batches."""
        return self.kind == "arrays"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.where == "workers" and self.code is None:
            raise ValueError(f"code: expected an artifact, because kind is {self.kind!r}")
        if (self.kind == "dataset") != (self.rows is not None):
            raise ValueError("rows: expected a number if kind is 'dataset', and none otherwise")
        if self.kind == "indexed" and self.batches is None:
            raise ValueError("batches: expected a number, because kind is 'indexed'")
        return self


def check_batch_bounds(algorithm: AlgorithmSpec, batch_size: int) -> None:
    """Raise UsageError unless batches with the mean ``batch_size`` fit into the bounds of ``dbs``."""
    least, most, unit = algorithm.batch_min, algorithm.batch_max, algorithm.batch_multiple
    if not least <= batch_size <= (most or batch_size):
        raise UsageError(
            f"batch='dbs': expected batch_size between batch_min={least} and batch_max={most}, because it is the mean "
            f"of all workers' batches. Received: batch_size={batch_size}."
        )
    if any(value % unit for value in (batch_size, most or unit, least if least > 1 else unit)):
        raise UsageError(
            f"batch='dbs': expected batch_size, batch_min and batch_max to be multiples of batch_multiple={unit}. "
            f"Received: batch_size={batch_size}, batch_min={least}, batch_max={most}."
        )


class JobSpec(_Spec):
    """Everything that a job server needs to train; arrays and program are artifacts named by their sha256.

    A job of another ``method`` than ``fit`` has one epoch without training steps, and then evaluates or predicts its
    validation data. Its ``train`` is not read.
    """

    name: str = Field("job", max_length=200, pattern=PRINTABLE)
    user: str = Field("", max_length=100, pattern=PRINTABLE, description="who submits it, by the client's own account")
    script: str = Field("", max_length=200, pattern=PRINTABLE, description="name of the client's program")
    program: str = Field(pattern=r"^[0-9a-f]{64}$", description="artifact of the program's JSON")
    artifacts: tuple[str, ...] = Field((), description="all artifacts the job needs, the program included")
    code: bool = Field(False, description="the program carries pickled code: needs a server with --allow-code")
    algorithm: AlgorithmSpec
    cluster: ClusterSpec = ClusterSpec()
    method: Literal["fit", "evaluate", "predict"] = Field("fit", description="method of Keras that the job carries out")
    fit: FitSpec
    train: DataSpec
    validation: DataSpec | None = None
    # Interactive (a client runs callbacks) or detached; stored specifications keep the old field name.
    attended: bool = Field(True, description="a client runs the callbacks at each epoch's end")
    callbacks: CallbacksSpec | None = Field(None, description="detached job: Keras' callbacks that a worker calls")
    forecast: SpeedForecast | None = Field(None, description="prediction, with which the speed is compared")
    priority: int = Field(0, ge=-100, le=100, description="among the waiting jobs of its owner")
    versions: dict[str, str] = Field(default_factory=dict, description="python, keras, tensorflow of the client")
    step_timeout_s: float = Field(600.0, gt=0, description="a worker silent this long is given up")
    start_timeout_s: float = Field(120.0, gt=0, description="how long to wait for the asked number of workers")

    @property
    def busy_report_s(self) -> float:
        """Interval at which a busy worker reports that its work advances, in seconds; well below ``step_timeout_s``."""
        return self.step_timeout_s / 4

    @field_validator("cluster")
    @classmethod
    def _emulation_of_every_worker(cls, cluster: ClusterSpec) -> ClusterSpec:
        cluster.emulate.check_counts(cluster.workers)
        return cluster

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> Self:
        data = self.validation
        if self.method != "fit" and (data is None or data.planned is None or not self.algorithm.topology_facts.flat):
            raise ValueError(f"method={self.method!r}: expected arrays as validation data, and independent workers")
        return self

    @field_validator("fit")
    @classmethod
    def _batch_within_bounds(cls, fit: FitSpec, info: Any) -> FitSpec:
        algorithm = info.data.get("algorithm")
        trains = info.data.get("method") == "fit"
        if trains and algorithm is not None and algorithm.batch_facts.follows_speed:
            check_batch_bounds(algorithm, fit.batch_size)
        return fit

    def sample_order(self, pass_index: int) -> RowNumbers:
        """Return the rows of the coordinator's plan in the order of a pass, shape ``(planned,)``."""
        fit, rows = self.fit, self.train.planned or 0
        if fit.shuffle and fit.block:
            return keras_order(rows, fit.seed, fit.block)
        return sample_order(rows, fit.shuffle, fit.seed, pass_index)

    def batch_share(self, samples: int) -> float:
        """Return the ratio of this many samples to a full local batch; a streamed batch is always full."""
        return samples / self.fit.batch_size if self.train.sized else 1.0

    def rate_of(self, samples: int, denominator: float = 0.0) -> float:
        """Return the factor of the learning rate for a gradient of this many samples.

        With ``dbs`` every sample has the same weight: b / b0, which is M * b_i / sum(b) as the sizes sum up to M * b0.
        The gradient of a sum, whose ``denominator`` is infinity, is proportional to its batch already.
        """
        return 1.0 if math.isinf(denominator) else self.algorithm.batch_facts.rate_of(self.batch_share(samples))


CLUSTER_OPTIONS = tuple(k for k in ClusterSpec.model_fields if k != "emulate")
_ALGORITHM_OPTIONS = tuple(k for k in AlgorithmSpec.model_fields if k != "name")
_PARTS = frozenset(name for preset in PRESETS.values() for name in preset)
_REMOVED = {
    "outer": "Groups push gradients. For several steps between two exchanges use algorithm='local-ddc' or 'diloco' "
    "(local_steps=...), without groups.",
}
OVERRIDES: tuple[str, ...] = (*_ALGORITHM_OPTIONS, *CLUSTER_OPTIONS, "emulate")


def _explain(error: ValidationError, received: Mapping[str, Any]) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        place = f"{where}: " if where else ""
        parts.append(f"{place}{reason}. Received: {item.get('input', received)!r}.")
    return " ".join(parts)


def check_names(options: Mapping[str, Any], valid: Sequence[str] = OVERRIDES) -> None:
    """Raise UsageError for the first option that is not in ``valid``, naming those that are similar."""
    for name in options:
        if name in _REMOVED:
            raise UsageError(f"{name}: expected no such option, it was removed. {_REMOVED[name]}")
        if name not in valid:
            raise UsageError(f"Unknown option {name!r}.{similar(name, valid)} `nfdt config` lists all options.")


def resolve_algorithm(name: str | None = None, **overrides: Any) -> AlgorithmSpec:
    """Return the preset ``name`` (default ``ddc-asgd``) with some axes or numbers overridden.

    Raises:
        UsageError: unknown preset, unknown option or invalid value; the message names similar or valid ones.
    """
    name = name or DEFAULT_PRESET
    if name not in PRESETS:
        raise UsageError(f"Unknown algorithm {name!r}.{similar(name, PRESETS)} Expected one of: {', '.join(PRESETS)}.")
    check_names(overrides, _ALGORITHM_OPTIONS)
    given = {k: v for k, v in overrides.items() if v is not None}
    try:
        return AlgorithmSpec(name=name, **{**PRESETS[name], **given})
    except ValidationError as error:
        raise UsageError(f"algorithm {name!r}: {_explain(error, given)}") from None


def find_idle(algorithm: AlgorithmSpec, cluster: ClusterSpec, given: Iterable[str]) -> dict[str, str]:
    """Return those given options that have no effect with this algorithm, with the reason for each.

    A part that equals the preset's own choice is redundant but correct, and is left out.
    """
    # Conditions refer to ``elastic`` as well, a property of the cluster.
    chosen = {**cluster.model_dump(), "elastic": cluster.elastic, **algorithm.model_dump()}
    own = resolve_algorithm(algorithm.name).model_dump()
    options = {**ClusterSpec.model_fields, **AlgorithmSpec.model_fields}
    idle = {}
    for name in given:
        if name not in options or (name in _PARTS and chosen[name] == own[name]):
            continue
        metadata = options[name].metadata
        if reason := why_idle(metadata, chosen):
            presets = [preset for preset, parts in PRESETS.items() if not why_idle(metadata, {**chosen, **parts})]
            instead = f" It has one with algorithm={' or '.join(map(repr, presets))}." if presets else ""
            idle[name] = f"{reason}{instead}"
    return idle


def resolve_cluster(**options: Any) -> ClusterSpec:
    """Return a ClusterSpec from ``workers``, ``shards``, the launch options of ranks, and ``emulate`` (a mapping).

    Raises:
        UsageError: unknown option or invalid value.
    """
    check_names(options, (*CLUSTER_OPTIONS, "emulate"))
    given = {k: v for k, v in options.items() if v is not None}
    try:
        return ClusterSpec(**given)
    except ValidationError as error:
        raise UsageError(_explain(error, given)) from None


def parse_job(text: str | bytes) -> JobSpec:
    """Return a JobSpec from JSON that came over the network.

    Raises:
        UsageError: the text is not JSON, has unknown fields or values out of range.
    """
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"Job specification refused: {_explain(error, {})}") from None


def check_groups(algorithm: AlgorithmSpec, cluster: ClusterSpec) -> None:
    """Raise UsageError unless the workers of this cluster can form the groups of this algorithm."""
    if not algorithm.topology_facts.grouped:
        return
    explicit_groups(algorithm.groups, cluster.workers)
    if cluster.hosts or cluster.hostfile or cluster.elastic or cluster.launcher == "world":
        raise UsageError(
            f"algorithm={algorithm.name!r}: expected groups whose worlds the server starts on its own machine. "
            "Received: hosts, hostfile, min_workers, max_workers, host_discovery_script or launcher='world'. "
            "Leave them out."
        )
