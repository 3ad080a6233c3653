"""``nfdt plan``: forecast of each algorithm on given workers, from a few steps of the script or of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from nfdt_client.options import Options, resolve_each

from nfdt.cli.options import (
    ScriptCommand,
    log_to_stderr,
    open_connection,
    parse_settings,
    script_argument,
    server_options,
)
from nfdt.cli.plan_report import PlanReport, profile_notes
from nfdt.cli.process import quiet_start
from nfdt.cli.script import Script, describe_failure, exit_code_of
from nfdt.cli.table import format_bytes
from nfdt.core.errors import UsageError
from nfdt.core.host.keras_backend import require_tensorflow
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import DEFAULT_PRESET, PRESETS
from nfdt.planning import Cluster
from nfdt.planning.calibration import ProfiledWork, spread_of_ratio, with_overhead
from nfdt.planning.comparison import OneMachine, PlannedRun, compare, one_machine, uses
from nfdt.planning.forecast import measured_cluster
from nfdt.simulate.cluster import parse_cluster, read_cluster
from nfdt.simulate.machines import costs_of


@click.command(cls=ScriptCommand)
@click.option("--workers", metavar="N", help="So many machines like this one.")
@click.option("--cluster", "file", type=click.Path(path_type=Path), help="Instead: what the workers are like, TOML.")
@click.option("--job", metavar="ID", help="Instead: the workers that a job of a server has measured.")
@click.option("--algorithm", "algorithms", default=",".join(PRESETS), metavar="A[,B...]", help="Presets; all of them.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other option; repeatable.")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to print.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan as a page too.")
@server_options
@script_argument(required=False)
@click.pass_context
def plan(
    context: click.Context,
    workers: str | None,
    file: Path | None,
    job: str | None,
    algorithms: str,
    settings: tuple[str, ...],
    format_: str,
    page: Path | None,
    script: Script | None,
    **server: str | None,
) -> None:
    """Predict how much faster than plain Keras each algorithm would train SCRIPT, and say which to take.

    SCRIPT runs up to its first model.fit, which tells batch size, samples and the model's size; a few of its steps are
    measured here unless --cluster says how long they take. Nothing is trained. With --job, which takes no SCRIPT, the
    workers are those that a job has measured.
    """
    log_to_stderr("warning")
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    if sum(each is not None for each in (workers, file, job)) > 1 or (job is None) == (script is None):
        raise UsageError("plan: expected [--workers N | --cluster FILE] SCRIPT, or --job ID.")
    described = read_cluster(file) if file else None
    given = {**parse_settings(settings), "workers": described.count if described else workers}
    chosen = resolve_each(given, names)
    notes: list[str] = []
    if script is None:
        costs, work = _measured(str(job), server)
    else:
        count = chosen[0].cluster.workers
        cluster = described or parse_cluster({"workers": [{"count": count, "speed": 1.0}]})
        work = _seen(context, script, chosen[0], profiled=cluster.is_relative)
        if work.profile:
            notes += profile_notes(work.profile, work.batch_size, None if file else count)
            cluster = cluster.measured(work.profile.worker_step(work.batch_size), work.batch_size, work.profile.apply_s)
        if not cluster.has_links:
            notes.append(
                f"no link is described: exchanging 2 x {format_bytes(4 * work.weights)} per step is taken as free"
            )
        costs = costs_of(cluster, work.batch_size, work.weights)
    usable = [each.algorithm for each in chosen if uses(each.algorithm, len(costs.workers))]
    if idle := ", ".join(each.algorithm.name for each in chosen if each.algorithm not in usable):
        notes.append(f"left out, because they are for several workers: {idle}")
    if not usable:
        raise UsageError(f"--algorithm: expected one that one worker can use, as {DEFAULT_PRESET}. Received: {idle}.")
    report = PlanReport(work, len(costs.workers), *_planned(work, costs, usable), notes)
    if page is not None:
        _write(page, report.to_html())
    click.echo(json.dumps(report.to_json(), indent=2) if format_ == "json" else report.text())


def _planned(
    work: ProfiledWork, costs: Cluster, algorithms: Sequence[AlgorithmSpec]
) -> tuple[OneMachine, list[PlannedRun]]:
    """Return one machine and the presets beside it, with what was measured."""
    profile = work.profile
    if profile is None or profile.plain is None or profile.worker is None:
        alone = one_machine(costs, work.samples)
        return alone, compare(algorithms, costs, work.samples, alone)
    step_s = profile.worker_step(work.batch_size).seconds(work.batch_size)
    alone = one_machine(costs, work.samples, profile.plain.step_s, step_s)
    spread = spread_of_ratio(profile.plain, profile.worker.epochs)
    return alone, compare(algorithms, with_overhead(costs, profile.worker), work.samples, alone, spread)


def _write(page: Path, text: str) -> None:
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html: expected a file that can be written. Received: {error}.") from None


def _seen(context: click.Context, script: Script, options: Options, *, profiled: bool) -> ProfiledWork:
    """Return the size of the script's first ``fit``."""
    try:
        require_tensorflow("trial steps compute")
        with quiet_start():
            from nfdt.cli.simulated import first_fit

        work = first_fit(script, options, profiled=profiled)
    except BaseException as error:  # as in nfdt run
        if message := describe_failure(error):
            click.echo(message, err=True)
        context.exit(exit_code_of(error))
    if work is None:
        raise UsageError(f"{script}: expected a script that calls model.fit. It ended without.")
    return work


def _measured(job: str, server: Mapping[str, str | None]) -> tuple[Cluster, ProfiledWork]:
    """Return the costs of a job's workers, and its work per epoch."""
    with open_connection(server["server"], server["token_file"], server["ca_file"]) as connection:
        workers = json.loads(connection.show(job).workers_json or "{}")
        ends = [event.data for event in connection.recorded(job) if event.kind == "epoch_end"]
    costs = measured_cluster(workers)
    if costs is None or not ends:
        raise UsageError(f"Job {job}: expected one that has ended an epoch. Received: nothing is measured yet.")
    return costs, ProfiledWork(costs.local_batch, int(ends[-1]["samples"]), 0)
