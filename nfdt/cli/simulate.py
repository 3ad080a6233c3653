"""``nfdt simulate``: the user's script on a described cluster under virtual time, once per algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from nfdt_client.options import Options, resolve_each

from nfdt.cli.options import (
    ScriptCommand,
    algorithms_option,
    exiting_as_python,
    log_level_option,
    log_to_stderr,
    script_argument,
    settings_option,
)
from nfdt.cli.script import Script, run_script, set_backend_of
from nfdt.cli.table import format_bytes, render
from nfdt.core.errors import UsageError
from nfdt.core.host.keras_backend import TENSORFLOW, require_backend
from nfdt.core.host.packages import install
from nfdt.core.host.startup import quiet_start
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.simulate.cluster import ClusterDescription, read_cluster

COLUMNS = (
    *("algorithm", "virtual s", "samples/s", "of limit", "of bound"),
    *("staleness", "max", "loss", "metric", "sent", "received"),
)


@click.command(cls=ScriptCommand)
@click.option(
    "--cluster", "file", required=True, type=click.Path(path_type=Path), help="What the cluster is like: TOML."
)
@algorithms_option(DEFAULT_PRESET, "Presets to compare.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for JSON, CSV and PNG.")
@click.option("--seed", default=0, help="Of Keras, NumPy and Python before each run of the script.")
@settings_option()
@log_level_option
@script_argument()
def simulate(
    file: Path,
    algorithms: list[str],
    output: Path | None,
    seed: int,
    settings: dict[str, str],
    log_level: str,
    script: Script,
) -> None:
    """Run SCRIPT unmodified, once per algorithm, on a cluster that is only described.

    Gradients are real, time is virtual: nothing but this process runs. See docs/simulate.md for the cluster's file.
    """
    log_to_stderr(log_level)
    set_backend_of(script)
    cluster = read_cluster(file)
    for name in settings:
        if name in ("workers", "shards") or name.startswith("emulate"):
            raise UsageError(f"--set {name}: no effect in a simulation. Expected: that in the file of --cluster.")
    options = resolve_each({**settings, "workers": cluster.count}, algorithms)
    results: list[dict[str, Any]] = []
    for name, resolved in zip(algorithms, options, strict=True):
        with exiting_as_python():
            results += simulated_fits(script, name, resolved, cluster, seed)
    if not results:
        raise UsageError(f"{script}: expected a script that calls model.fit. It ended without.")
    _print(results)
    if output is not None:
        _write(results, output)


def simulated_fits(
    script: Script, algorithm: str, options: Options, cluster: ClusterDescription, seed: int
) -> list[dict[str, Any]]:
    """Run the script once and return one result per ``fit`` in it."""
    require_backend((TENSORFLOW, "jax"), "simulations compute")
    with quiet_start():
        from nfdt.cli.simulated import SimulatedSession
        from nfdt.model.training.plain_training import reset_keras
        from nfdt.simulate.results import result_of

        reset_keras(seed)
    click.echo(f"== {algorithm}", err=True)
    with SimulatedSession(options, cluster) as session:
        try:
            run_script(script)
        except SystemExit as end:  # the other algorithms are still to run
            if end.code not in (None, 0):
                raise
    found = []
    for number, job in enumerate(session.jobs):
        name = algorithm if len(session.jobs) == 1 else f"{algorithm} (job {number + 1})"
        found.append({"name": name, "fit": number, **result_of(job, algorithm, cluster, job.worker_statistics())})
    return found


def _write(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write JSON, CSV and, if matplotlib is installed, PNG."""
    from nfdt.simulate import results as formats

    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "results.json": formats.to_json(results),
        "curves.csv": formats.curves_csv(results),
        "staleness.csv": formats.staleness_csv(results),
        "machines.csv": formats.machines_csv(results),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        click.echo(f"wrote {folder / name}", err=True)
    if formats.can_plot():
        formats.plot(results, folder / "curves.png")
        click.echo(f"wrote {folder / 'curves.png'}", err=True)
    else:
        click.echo(f"No picture: matplotlib is not installed. Install it: {install('plots')}", err=True)


def _print(results: Sequence[Mapping[str, Any]]) -> None:
    limits = results[0]["limits"]
    click.echo(render(COLUMNS, [_row(result) for result in results]))
    click.echo(f"limit: {limits['samples_per_s']:,.0f} samples/s, the sum of the workers' own speeds")
    bounds = ", ".join(
        f"{bound['seconds']:.4g} s with {bound['workers']} workers at {noise}"
        for noise, bound in limits["lower_bound"].items()
    )
    click.echo(f"bound: least time of any such method, per L*Delta/eps, by noise s2/eps: {bounds}")


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    from nfdt.simulate.results import metric_of

    last: Mapping[str, float] = next((p["logs"] for p in reversed(result["curve"]) if p["ends_epoch"]), {})
    metric = metric_of([result])
    return (
        result["name"],
        f"{result['virtual_s']:.2f}",
        f"{result['samples_per_s']:,.0f}",
        f"{result['of_limit']:.3f}",
        " ".join(f"{ratio:.2f}" for ratio in result["of_lower_bound"].values()),
        f"{result['mean_staleness']:.2f}",
        str(result["most_staleness"]),
        f"{last.get('loss', float('nan')):.4f}",
        f"{metric} {last[metric]:.4f}" if metric else "-",
        format_bytes(result["bytes_sent"]),
        format_bytes(result["bytes_received"]),
    )
