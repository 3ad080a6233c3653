"""Types of the options of ``distribute`` and its siblings, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class EmulateOptions(TypedDict, total=False):
    """Fields of :class:`nfdt.core.specs.emulation.Emulation`, where they are described."""

    slowdown: float | Sequence[float]
    step_ms: float | Sequence[float]
    bandwidth_mbit: float | Sequence[float]
    latency_ms: float | Sequence[float]
    devices: int | Sequence[int]
    fail: str


class FitOptions(TypedDict, total=False):
    """Options of a session besides those with parameters of their own; ``nfdt config`` prints and explains them.

    They are the fields of :class:`~nfdt.core.specs.algorithm.AlgorithmSpec` and
    :class:`~nfdt.core.specs.job.ClusterSpec`, and those of :class:`~nfdt_client.options.Options`.
    """

    # connection
    token: str
    token_file: str
    ca_file: str
    cert_file: str
    key_file: str
    insecure: bool
    # fits
    batch_hooks: Literal["auto", "exact", "approximate"]
    data: Literal["auto", "client", "workers"]
    evaluate: bool | Literal["auto", "true", "false"]
    fallback: Literal["error", "local"]
    forecast: str
    job: str
    keep_runs: int
    priority: int
    tensorboard: str
    ui: bool
    warm: bool
    start_timeout_s: float
    step_timeout_s: float
    # parts of the algorithm
    topology: Literal["flat", "groups", "ring"]
    consistency: Literal["free", "ssp", "bsp", "softsync"]
    update_rule: Literal["plain", "dc", "dc-a", "dc-k", "ddc", "staleness-scaled"]
    batch: Literal["fixed", "dbs"]
    exchange: Literal["every-step", "local-steps"]
    tasks: Literal["static", "proportional", "dynamic", "finish-together"]
    overlap: int
    plan: Literal["nothing", "overlap", "topology"]
    codec: Literal["identity", "bf16", "fp16", "int8", "int4", "top-k", "adaptive"]
    reply_codec: Literal["identity", "bf16", "fp16", "int8", "int4", "top-k"]
    top_k: float
    error_budget: float
    sparse: bool | Literal["lazy"]
    worker_tables_mb: int
    staleness_bound: int
    softsync_n: int
    dc_lambda: float
    dc_clip: float
    dc_decay: float
    gap: float
    batch_min: int
    batch_max: int
    batch_multiple: int
    scale_lr: Literal["linear", "sqrt"]
    warmup_epochs: float
    groups: str | int
    local_steps: int | Literal["auto"]
    local_rate: float
    outer_lr: float
    outer_momentum: float
    # cluster
    shards: int
    devices_per_worker: int | Literal["all"]
    launcher: Literal["auto", "slots", "mpirun", "horovodrun", "world"]
    hosts: str
    hostfile: str
    fetch_whole_mb: int
    snapshot_s: float
    heartbeat_s: float
    lost_s: float
    epoch_overlap: bool
    emulate: EmulateOptions
    # Horovod
    fusion_threshold_mb: int
    cycle_time_ms: float
    autotune: bool
    autotune_log: str
    timeline: str
    stall_warning_s: int
    stall_shutdown_s: int
    min_workers: int
    max_workers: int
    host_discovery_script: str
    network_interfaces: str
    commit_steps: int
    elastic_timeout_s: int
    reset_limit: int
    host_cooldown_s: int
