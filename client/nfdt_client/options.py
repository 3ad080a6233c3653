"""Resolution of options: argument > environment > file > default. The only reader of the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nfdt.core.errors import UsageError
from nfdt.core.host.launcher_rank import LauncherRank, find_world
from nfdt.core.jobs.names import check_name
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import (
    CLUSTER_OPTIONS,
    OVERRIDES,
    ClusterSpec,
    Emulation,
    JobSpec,
    SpeedForecast,
    check_groups,
    find_idle,
    resolve_algorithm,
    resolve_cluster,
)
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt_client import batch_hooks, evaluation_mode, local_fit, placement, ring
from nfdt_client.connection_options import CONNECTION, TLS, check_server, find_token
from nfdt_client.layers import (
    ARGUMENT,
    Setting,
    flatten,
    from_environment,
    from_file,
    refuse_idle,
    telling_origins,
)
from nfdt_client.planned_speed import read_forecast

logger = logging.getLogger(__name__)

TIMEOUTS = ("start_timeout_s", "step_timeout_s")
OF_FITS = ("batch_hooks", "data", "evaluate", "fallback", "forecast", "job", "tensorboard", "ui", "warm")
EMULATION = tuple(f"emulate.{name}" for name in Emulation.model_fields)
NAMES: tuple[str, ...] = (
    "algorithm",
    *CONNECTION,
    *TIMEOUTS,
    *OF_FITS,
    *(name for name in OVERRIDES if name != "emulate"),
    *EMULATION,
)
_TUPLES = ("emulate.slowdown", "emulate.step_ms", "emulate.bandwidth_mbit", "emulate.latency_ms")


@dataclass(frozen=True)
class Options:
    """All options of a session, validated.

    Attributes:
        server: ``HOST:PORT`` of a job server; None for the embedded one.
        batch_hooks: Timing of the callbacks' batch hooks: auto, exact, or approximate.
        data: Place where the data of ``fit`` are read: auto, client, or workers.
        evaluate: Whether workers evaluate and predict: auto, true, or false.
        fallback: What to do with a fit that cannot be distributed: error, or local.
        forecast: Speed that ``nfdt plan`` has predicted; the job's log and page compare it with the measured one.
        job: Name of the job of the first fit at the server; later fits are numbered. None: the jobs have no names.
        tensorboard: Folder in which each fit writes its metrics for TensorBoard; None: none are written.
        ui: Whether the server that a script without ``server`` starts serves a page for browsers.
        warm: Whether a script without ``server`` uses the warm server of this machine, if one runs.
        workers_given: Whether the number of workers is given; otherwise it is the default.
        world: Launcher's world that this script is a rank of, for jobs that run on these ranks.
        settings: Every option by name with its value and origin, for ``nfdt config``.
    """

    algorithm: AlgorithmSpec
    cluster: ClusterSpec
    server: str | None = None
    tls: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 120.0
    step_timeout_s: float = 600.0
    batch_hooks: str = "auto"
    data: str = "auto"
    evaluate: str = "auto"
    fallback: str = "error"
    forecast: SpeedForecast | None = None
    job: str | None = None
    tensorboard: Path | None = None
    ui: bool = False
    warm: bool = True
    workers_given: bool = False
    world: LauncherRank | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict, repr=False)
    _token: str | None = field(default=None, repr=False)
    _token_file: str | None = None

    def token(self) -> str:
        """Return the secret for the server.

        Raises:
            UsageError: there is none, or its file cannot be read.
        """
        return find_token(self.server, self._token, self._token_file)


def _coerce(name: str, value: Any) -> Any:
    if name in _TUPLES and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{name}: expected seconds above 0. Received: {value!r}.")
    return seconds


def _switch(name: str, value: Any) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise UsageError(f"{name}: expected true or false. Received: {value!r}.")
    return found


def _checked_job(name: Any, server: Any) -> str | None:
    if name is None:
        return None
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
        UsageError: unknown option or preset, or a value that cannot be used; the message names the valid ones.
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
    layers = {
        **from_file((directory or Path.cwd()).resolve(), NAMES),
        **from_environment(environ, NAMES),
        **{name: Setting(value, ARGUMENT) for name, value in flatten(arguments, "arguments", NAMES).items()},
    }
    given = {name: Setting(_coerce(name, s.value), s.origin) for name, s in layers.items()}
    found, idle = [], []
    for algorithm in algorithms:
        chosen = {**given, "algorithm": Setting(algorithm, ARGUMENT)} if algorithm else given
        with telling_origins(chosen):
            options, reasons = _without_idle(chosen, default_algorithm, environ)
            found.append(_with_counts(options))
        idle.append(reasons)
    refuse_idle(given, idle)
    return found


def _without_idle(
    given: dict[str, Setting], default_algorithm: str, environ: Mapping[str, str]
) -> tuple[Options, dict[str, str]]:
    """Return the options without those that have no effect, and the reason for each of the latter."""
    options = _in_world(_validated(given, default_algorithm), environ)
    idle = find_idle(options.algorithm, options.cluster, given)
    if not idle:
        return options, {}
    rest = {name: setting for name, setting in given.items() if name not in idle}
    options = _in_world(_validated(rest, default_algorithm), environ)
    ignored = {name: Setting(given[name].value, f"{given[name].origin}: no effect") for name in idle}
    return replace(options, settings={**options.settings, **ignored}), idle


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
    options = replace(options, cluster=ring.found_files(options.cluster)) if options.server is None else options
    world = find_world(environ) if options.server is None else None
    if world is None:
        return options
    if options.workers_given and options.cluster.workers != world.size:
        logger.warning("The launcher started %d ranks: workers=%d is ignored", world.size, options.cluster.workers)
    cluster = options.cluster.model_copy(
        update={
            "workers": world.size,
            "launcher": "world",
            "hosts": None,
            "hostfile": None,
            **ring.comes_and_goes(environ),
        }
    )
    return replace(options, cluster=cluster, world=world)


def _validated(given: dict[str, Setting], default_algorithm: str) -> Options:
    values = {name: setting.value for name, setting in given.items()}
    preset = values.pop("algorithm", None) or default_algorithm
    emulate = {name.removeprefix("emulate."): values.pop(name) for name in EMULATION if name in values}
    cluster = resolve_cluster(emulate=emulate, **{name: values.pop(name) for name in CLUSTER_OPTIONS if name in values})
    timeouts: dict[str, Any] = {name: _seconds(name, values.pop(name)) for name in TIMEOUTS if name in values}
    connection = {name: values.pop(name) for name in CONNECTION if name in values}
    hooks = values.pop("batch_hooks", "auto")
    data = placement.check_mode(values.pop("data", "auto"))
    evaluate = evaluation_mode.check_mode(values.pop("evaluate", "auto"))
    fallback = local_fit.check_fallback(values.pop("fallback", "error"))
    plan = values.pop("forecast", None)
    board = values.pop("tensorboard", None)
    job = _checked_job(values.pop("job", None), connection.get("server"))
    switches: dict[str, Any] = {
        name: _switch(name, values.pop(name, default)) for name, default in (("ui", False), ("warm", True))
    }
    algorithm = resolve_algorithm(preset, **values)
    check_groups(algorithm, cluster)
    forecast = None if plan is None else read_forecast(plan, algorithm.name, cluster.workers)
    server = check_server(connection["server"]) if "server" in connection else None
    options = Options(
        algorithm,
        cluster,
        server=server,
        tls={name: connection[name] for name in TLS if connection.get(name)},
        batch_hooks=batch_hooks.check_mode(hooks, algorithm),
        data=data,
        evaluate=evaluate,
        fallback=fallback,
        forecast=forecast,
        job=job,
        tensorboard=None if board is None else Path(board),
        **switches,
        workers_given="workers" in given,
        settings=_explained(given, preset, algorithm, cluster),
        _token=connection.get("token"),
        _token_file=connection.get("token_file"),
        **timeouts,
    )
    return options


def _explained(
    given: Mapping[str, Setting], preset: str, algorithm: AlgorithmSpec, cluster: ClusterSpec
) -> dict[str, Setting]:
    """Return every option with the validated value and the layer it came from."""
    resolved: dict[str, Any] = {
        "algorithm": preset,
        "batch_hooks": "auto",
        "data": "auto",
        "evaluate": "auto",
        "fallback": "error",
        "ui": False,
        "warm": True,
        **{name: JobSpec.model_fields[name].default for name in TIMEOUTS},
        **{name: getattr(cluster, name) for name in CLUSTER_OPTIONS},
        **{name: value for name, value in algorithm.model_dump().items() if name != "name"},
        **{f"emulate.{name}": value for name, value in cluster.emulate.model_dump().items()},
    }
    settings = {}
    for name in NAMES:
        origin = given[name].origin if name in given else "default"
        if origin == "default" and name not in resolved:
            settings[name] = Setting(None, origin)
        elif name == "token":
            settings[name] = Setting("(hidden)", origin)
        else:
            as_given = name in given and name in (*CONNECTION, *TIMEOUTS, *OF_FITS)
            settings[name] = Setting(given[name].value if as_given else resolved.get(name), origin)
    return settings
