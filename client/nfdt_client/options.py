"""Resolves the options of a session: argument > environment > file > default."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nfdt.core.errors import UsageError
from nfdt.core.host.keras_backend import (
    TORCH,
    TRAINING,
    configured_backend,
    current_backend,
    loaded_backend,
    require_backend,
)
from nfdt.core.host.launcher_rank import LauncherRank, find_world
from nfdt.core.host.machine import find_gpus
from nfdt.core.jobs.names import check_name
from nfdt.core.jobs.rank_backends import check_ranks
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import (
    CLUSTER_OPTIONS,
    OVERRIDES,
    ClusterSpec,
    Emulation,
    SpeedForecast,
    check_groups,
    find_idle,
    resolve_algorithm,
    resolve_cluster,
)
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt_client import ring
from nfdt_client.connection_options import CONNECTION, ConnectionOptions, connection_fields, switch
from nfdt_client.layers import (
    ARGUMENT,
    DEFAULT,
    Setting,
    flatten,
    from_environment,
    from_file,
    naming_origins,
    refuse_foreign_server,
    refuse_idle,
)

logger = logging.getLogger(__name__)

TIMEOUTS = ("start_timeout_s", "step_timeout_s")
CHOICES = {
    "batch_hooks": ("auto", "exact", "approximate"),
    "data": ("auto", "client", "workers"),
    "evaluate": ("auto", "True", "False"),
    "fallback": ("error", "local"),
}
SWITCHES = ("ui", "warm")
RANGES = {"keep_runs": (0, 10_000), "priority": (-100, 100)}
OF_SESSION = (*CONNECTION, *TIMEOUTS, *CHOICES, *SWITCHES, "forecast", "job", "keep_runs", "priority", "tensorboard")
EMULATION = tuple(f"emulate.{name}" for name in Emulation.model_fields)
NAMES: tuple[str, ...] = ("algorithm", *OF_SESSION, *(name for name in OVERRIDES if name != "emulate"), *EMULATION)
_TUPLES = ("emulate.slowdown", "emulate.step_ms", "emulate.bandwidth_mbit", "emulate.latency_ms", "emulate.devices")


@dataclass(frozen=True, kw_only=True)
class Options(ConnectionOptions):
    """All options of a session, validated. Without ``server`` the session starts an embedded one.

    Attributes:
        batch_hooks: Timing of the callbacks' batch hooks: auto, exact, or approximate.
        data: Place where the data of ``fit`` are read: auto, client, or workers.
        evaluate: Whether workers evaluate and predict: auto, true, or false.
        fallback: What to do with a fit that cannot be distributed: error, or local.
        forecast: Speed that ``nfdt plan`` has predicted; the job's log and page compare it with the measured one.
        job: Name of the job of the first fit at the server; later fits are numbered. None: the jobs have no names.
        keep_runs: Number of runs that are kept for ``nfdt runs``, the oldest go first; 0: this one is not kept.
        priority: Among the waiting jobs of one owner, those of a higher priority start first: -100 to 100.
        tensorboard: Folder in which each fit writes its metrics for TensorBoard; None: none are written.
        ui: Whether the server that a script without ``server`` starts serves a page for browsers.
        warm: Whether a script without ``server`` uses the warm server of this machine, if one runs.
        workers_given: Whether the number of workers is given; otherwise it is the default.
        world: Launcher's world that this script is a rank of, for jobs that run on these ranks.
        settings: Every option by name with its value and origin, for ``nfdt config``.
    """

    algorithm: AlgorithmSpec
    cluster: ClusterSpec
    start_timeout_s: float = 120.0
    step_timeout_s: float = 600.0
    batch_hooks: str = "auto"
    data: str = "auto"
    evaluate: str = "auto"
    fallback: str = "error"
    forecast: SpeedForecast | None = None
    job: str | None = None
    keep_runs: int = 200
    priority: int = 0
    tensorboard: Path | None = None
    ui: bool = False
    warm: bool = True
    workers_given: bool = False
    world: LauncherRank | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict, repr=False)

    def require_backend(self) -> None:
        """Check that the algorithm trains on the backend that Keras has loaded, or will load.

        Raises:
            CaptureError: it does not.
        """
        require_backend(TRAINING)
        check_ranks(self.algorithm, self.cluster, current_backend().name)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{name}: expected seconds above 0. Received: {value!r}.")
    return seconds


def _whole(name: str, value: Any) -> int:
    least, most = RANGES[name]
    with contextlib.suppress(TypeError, ValueError):
        if least <= (number := int(value)) <= most:
            return number
    raise UsageError(f"{name}: expected a whole number from {least} to {most}. Received: {value!r}.")


def _choice(name: str, value: Any) -> str:
    choice = str(value).lower()
    if choice not in [each.lower() for each in CHOICES[name]]:
        raise UsageError(f"{name}: expected one of {', '.join(CHOICES[name])}. Received: {value!r}.")
    return choice


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(TIMEOUTS, _seconds),
    **dict.fromkeys(CHOICES, _choice),
    **dict.fromkeys(SWITCHES, switch),
    **dict.fromkeys(RANGES, _whole),
    "tensorboard": lambda name, value: Path(value),
}


def _checked_job(name: Any, server: Any) -> str:
    if server is None:
        raise UsageError(
            f"job={name!r}: expected server='HOST:PORT' with it, or NFDT_SERVER in the environment. Received: none. "
            "The server that a script starts ends with the script, and its jobs too."
        )
    return check_name(str(name))


def resolve(
    arguments: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    default_algorithm: str = DEFAULT_PRESET,
) -> Options:
    """Merge the layers and validate the result.

    Args:
        arguments: Options given in code or on the command line; ``emulate`` as a mapping or as dotted
            names (``emulate.slowdown``); None means not given.
        environ: The environment; default: that of the process.
        directory: Directory where the search for a configuration file starts; default: the working directory.
        default_algorithm: Preset if no layer names one.

    Raises:
        UsageError: unknown option or preset, or a value that cannot be used; the message names similar or valid ones.
    """
    (options,) = resolve_each(arguments, [None], environ, directory, default_algorithm)
    return options


def resolve_each(
    arguments: Mapping[str, Any],
    algorithms: Sequence[str | None],
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    default_algorithm: str = DEFAULT_PRESET,
) -> list[Options]:
    """Merge the layers for each of several presets; see :func:`resolve`.

    An option is reported to have no effect only if it has none with any of the presets.

    Args:
        arguments: As for :func:`resolve`.
        algorithms: Presets, each used like an argument; None: the preset that the layers name.
        environ: As for :func:`resolve`.
        directory: As for :func:`resolve`.
        default_algorithm: As for :func:`resolve`.
    """
    environ = os.environ if environ is None else environ
    file = from_file((directory or Path.cwd()).resolve(), NAMES)
    others = {
        **from_environment(environ, NAMES),
        **{name: Setting(value, ARGUMENT) for name, value in flatten(arguments, NAMES).items()},
    }
    refuse_foreign_server(file, others)
    given = {name: _split_text(name, setting) for name, setting in {**file, **others}.items()}
    found, idle = [], []
    for algorithm in algorithms:
        chosen = {**given, "algorithm": Setting(algorithm, ARGUMENT)} if algorithm else given
        with naming_origins(chosen):
            options, reasons = _without_idle(chosen, default_algorithm, environ)
            found.append(_with_counts(_on_gpus(options, environ)))
        idle.append(reasons)
    refuse_idle(given, idle)
    return found


def _split_text(name: str, setting: Setting) -> Setting:
    """Split the text of an option with one value per worker, as it comes from the environment."""
    if name not in _TUPLES or not isinstance(setting.value, str):
        return setting
    return replace(setting, value=tuple(part.strip() for part in setting.value.split(",") if part.strip()))


def _without_idle(
    given: dict[str, Setting], default_algorithm: str, environ: Mapping[str, str]
) -> tuple[Options, dict[str, str]]:
    """Return the options without those that have no effect, and the reason for each of the latter."""
    options = _in_world(_validated(given, default_algorithm), environ)
    # Whether an option has an effect depends on the others, so it is known only after all are validated.
    idle = find_idle(options.algorithm, options.cluster, given)
    if not idle:
        return options, {}
    rest = {name: setting for name, setting in given.items() if name not in idle}
    options = _in_world(_validated(rest, default_algorithm), environ)
    ignored = {name: Setting(given[name].value, f"{given[name].origin}: no effect") for name in idle}
    return replace(options, settings={**options.settings, **ignored}), idle


def _on_gpus(options: Options, environ: Mapping[str, str]) -> Options:
    """Let one worker have all GPUs of this machine, if there are several and the session starts its workers here.

    PyTorch has no steps on several devices here: workers share the GPUs, as with a number of workers.
    """
    backend = (loaded_backend() or configured_backend(environ)).name
    chosen = options.workers_given or options.cluster.devices_per_worker is not None
    if chosen or options.server is not None or not options.algorithm.topology_facts.flat or backend == TORCH:
        return options
    if len(find_gpus(environ)) < 2:
        return options
    one = {"workers": 1, "devices_per_worker": "all"}
    shown = {name: Setting(value, "the GPUs of this machine") for name, value in one.items()}
    cluster = options.cluster.model_copy(update=one)
    return replace(options, cluster=cluster, settings={**options.settings, **shown})


def _with_counts(options: Options) -> Options:
    """Check that emulation has one value per worker, if the number of workers is known by now."""
    if options.server is None or options.workers_given:
        try:
            options.cluster.emulate.check_counts(options.cluster.workers)
        except ValueError as error:
            raise UsageError(f"{error}.") from None
    return options


def _in_world(options: Options, environ: Mapping[str, str]) -> Options:
    """Place an allreduce job of a script started by mpirun, srun or horovodrun on the ranks of that world."""
    if not options.algorithm.topology_facts.allreduce:
        return options
    if options.cluster.shards != 1:
        raise UsageError(f"shards: expected 1, because allreduce has none. Received: {options.cluster.shards}.")
    emulate = options.cluster.emulate
    if emulate.bandwidth_mbit or emulate.latency_ms:
        raise UsageError(
            "emulate: expected no bandwidth_mbit or latency_ms for allreduce, whose bytes Horovod carries. "
            f"Received: {emulate.bandwidth_mbit or emulate.latency_ms}. Use algorithm='bsp' to try slow links."
        )
    if options.server is not None:
        return options
    options = replace(options, cluster=ring.resolve_files(options.cluster))
    world = find_world(environ)
    if world is None:
        return replace(options, cluster=ring.place_first_rank(options.cluster))
    if options.workers_given and options.cluster.workers != world.size:
        logger.warning("The launcher started %d ranks: workers=%d is ignored", world.size, options.cluster.workers)
    cluster = options.cluster.model_copy(
        update={
            "workers": world.size,
            "launcher": "world",
            "hosts": None,
            "hostfile": None,
            **ring.elastic_limits(environ),
        }
    )
    return replace(options, cluster=cluster, world=world)


def _validated(given: dict[str, Setting], default_algorithm: str) -> Options:
    values = {name: setting.value for name, setting in given.items()}
    preset = values.pop("algorithm", None) or default_algorithm
    emulate = {name.removeprefix("emulate."): values.pop(name) for name in EMULATION if name in values}
    cluster = resolve_cluster(emulate=emulate, **{name: values.pop(name) for name in CLUSTER_OPTIONS if name in values})
    session = {name: values.pop(name) for name in OF_SESSION if name in values}
    checked = {name: check(name, session[name]) for name, check in _CHECKS.items() if name in session}
    if "job" in session:
        checked["job"] = _checked_job(session["job"], session.get("server"))
    algorithm = resolve_algorithm(preset, **values)
    check_groups(algorithm, cluster)
    if checked.get("batch_hooks") == "exact":
        _require_exact(algorithm)
    if "forecast" in session:
        checked["forecast"] = _read_forecast(session["forecast"], algorithm.name, cluster.workers)
    return Options(
        algorithm=algorithm,
        cluster=cluster,
        workers_given="workers" in given,
        settings=_explained(given, preset, algorithm, cluster),
        **connection_fields(session),
        **checked,
    )


def _require_exact(algorithm: AlgorithmSpec) -> None:
    """Raise UsageError if a step of the algorithm is not one batch, so that exact hooks are impossible."""
    if reason := why_never_exact(algorithm):
        raise UsageError(
            f"batch_hooks='exact': expected an algorithm with one batch size and without groups, as ddc-asgd, bsp or "
            f"allreduce. Received: {algorithm.name!r}, {reason}. Choose another algorithm, or "
            "batch_hooks='approximate'."
        )


def why_never_exact(algorithm: AlgorithmSpec) -> str | None:
    """Return the reason why training cannot pause after a step; None if it can."""
    if algorithm.topology_facts.grouped:
        return "whose groups step on their own"
    if algorithm.plan == "topology":
        return "whose workers may turn to groups (plan='topology')"
    if algorithm.batch_facts.follows_speed:
        return "whose batches change their size (batch='dbs')"
    return None


def _read_forecast(file: Any, algorithm: str, workers: int) -> SpeedForecast:
    """Return the forecast of an algorithm from the output of ``nfdt plan --format json``.

    Raises:
        UsageError: the file cannot be read, or has no forecast of this algorithm on so many workers.
    """
    try:
        plan = json.loads(Path(file).read_text(encoding="utf-8"))
        planned, found = plan["workers"], {each["algorithm"]: each for each in plan["forecasts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"forecast: expected a file that `nfdt plan --format json` has written. Received: {file} "
            f"({type(error).__name__}: {error})."
        ) from None
    if planned != workers or algorithm not in found:
        raise UsageError(
            f"forecast: expected a plan of {algorithm} on {workers} workers. Received: one of "
            f"{', '.join(found)} on {planned} workers, in {file}."
        )
    try:
        return SpeedForecast(**{name: found[algorithm].get(name) for name in SpeedForecast.model_fields})
    except ValidationError as error:
        raise UsageError(f"forecast: expected numbers for {algorithm} in {file}. Received: {error}.") from None


def _explained(
    given: Mapping[str, Setting], preset: str, algorithm: AlgorithmSpec, cluster: ClusterSpec
) -> dict[str, Setting]:
    """Return every option with the validated value and the layer it came from."""
    resolved: dict[str, Any] = {
        **{each.name: each.default for each in fields(Options) if each.name in OF_SESSION},
        **cluster.model_dump(include=set(CLUSTER_OPTIONS)),
        **algorithm.model_dump(),
        **{f"emulate.{name}": value for name, value in cluster.emulate.model_dump().items()},
        "algorithm": preset,
        # Options of the session are shown as they are given, not as what is read from their files.
        **{name: setting.value for name, setting in given.items() if name in OF_SESSION},
    }
    if "token" in given:
        resolved["token"] = "(hidden)"
    origins = {name: setting.origin for name, setting in given.items()}
    return {name: Setting(resolved.get(name), origins.get(name, DEFAULT)) for name in NAMES}
