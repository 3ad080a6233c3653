"""``nfdt plan``: forecast of each algorithm on given workers, from a few steps of the script or of a job.

A plan has three forms with the same numbers: text, JSON and a page.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from nfdt_client.options import Options, resolve_each

from nfdt.cli.options import (
    ScriptCommand,
    algorithms_option,
    exiting_as_python,
    format_option,
    log_to_stderr,
    open_connection,
    script_argument,
    server_options,
    settings_option,
    write_output,
)
from nfdt.cli.script import Script
from nfdt.cli.table import format_bytes, render
from nfdt.core.errors import UsageError
from nfdt.core.host.keras_backend import require_tensorflow
from nfdt.core.host.machine import memory
from nfdt.core.host.startup import quiet_start
from nfdt.core.html_page import COLOURS, render_page, render_table
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import DEFAULT_PRESET, PRESETS
from nfdt.planning.accuracy import measured_trainings
from nfdt.planning.calibration import DOMINANT_SHARE, Profile, ProfiledWork, spread_of_ratio, with_overhead
from nfdt.planning.comparison import TOO_HIGH, TOO_HIGH_TOGETHER, OneMachine, PlannedRun, compare, one_machine, suits
from nfdt.planning.cost_model import Cluster
from nfdt.planning.forecast import measured_cluster, recommend
from nfdt.planning.memory import MachineMemory, ModelBytes, by_machine
from nfdt.simulate.cluster import ClusterDescription, parse_cluster, read_cluster
from nfdt.simulate.machines import costs_of

COLUMNS = (
    *("algorithm", "samples/s", "speed-up", "from - to", "s per epoch", "staleness", "max", "bottleneck"),
    "accuracy lost",
)
CAPTION = (
    "speed-up: times as fast as the first row. bottleneck: part of an epoch that would be saved without it.\n"
    f"from - to: by the quartiles of measured epochs; from: less {100 * TOO_HIGH:.0f} % for several workers,\n"
    f"{100 * TOO_HIGH_TOGETHER:.0f} % where they wait for each other, by which published plans were too high;\n"
    "to: at most the sum of the workers' speeds.\n"
    "accuracy lost: points of test accuracy below one machine after the same samples, from the least to the most of\n"
    f"our own trainings ({'; '.join(t.task for t in measured_trainings())}), SGD with momentum 0.9;\n"
    "diverges: at one machine's learning rate. Yours may lose more or less: see docs/convergence.md."
)
_BAR, _LABEL, _HIGH = 420, 150, 22


@dataclass(frozen=True)
class PlanReport:
    """A plan.

    Attributes:
        work: Size of the ``fit``.
        workers: Number of workers.
        alone: One machine.
        runs: Presets.
        notes: Lines about what was measured and assumed.
        memory: Memory of the recommended preset on each machine; empty if the size of the model is unknown.
    """

    work: ProfiledWork
    workers: int
    alone: OneMachine
    runs: Sequence[PlannedRun]
    notes: Sequence[str]
    memory: Sequence[MachineMemory] = ()

    def _memory_line(self) -> list[str]:
        """Return the memory as a line, if it is known."""
        if not self.memory:
            return []
        found = [f"{one.processes}: {format_bytes(one.peak)}{' each' * (one.count > 1)}" for one in self.memory]
        return [f"memory besides data and activations: {'; '.join(found)}. This one has {format_bytes(memory().total)}"]

    @property
    def title(self) -> str:
        """Size of the ``fit`` in words."""
        model = f"{self.work.weights:,} weights, " if self.work.weights else ""
        return f"{model}{self.work.samples:,} samples per epoch, batches of {self.work.batch_size}"

    @property
    def recommended(self) -> tuple[PlannedRun, str]:
        """Preset to take, and the reasons as sentences."""
        best, reason = recommend([run.forecast for run in self.runs])
        run = next(run for run in self.runs if run.forecast is best)
        faster = f"{run.low:.1f} to {run.high:.1f} times as fast as {self.alone.name}"
        if not run.is_faster:
            reason = f"{self.alone.name}: no row of workers is expected to be faster. The best of them is {reason}"
        return run, f"{reason} It is {faster}; bottleneck: {run.bottleneck}, {run.bottleneck.remedy}."

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table; the first one is that of one machine."""
        alone = self.alone
        yield (alone.name, f"{alone.samples_per_s:,.0f}", "1", "", f"{alone.epoch_s:.2f}", "0", "0", "compute", "0")
        for run in self.runs:
            each = run.forecast
            yield (
                *(each.algorithm, f"{each.samples_per_s:,.0f}"),
                *(f"{run.speed_up:.2f}", f"{run.low:.2f} - {run.high:.2f}", f"{each.epoch_s:.2f}"),
                *(f"{each.staleness:.1f}", f"{each.most_staleness:.1f}", str(run.bottleneck), str(each.loss)),
            )

    def text(self) -> str:
        """Return the plan for a terminal."""
        notes = [*self.notes, *self._memory_line()]
        lines = [self.title, *notes, render(COLUMNS, self.rows()), CAPTION, f"take {self.recommended[1]}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data, which the option ``forecast`` of a run reads."""
        run, reason = self.recommended
        forecasts = [
            {
                **asdict(run.forecast),
                "speed_up": run.speed_up,
                "range": [run.low, run.high],
                "bottleneck": asdict(run.bottleneck),
            }
            for run in self.runs
        ]
        return {
            "work": asdict(self.work),
            "workers": self.workers,
            "one_machine": asdict(self.alone),
            "forecasts": forecasts,
            "memory": [asdict(one) for one in self.memory],
            "recommended": run.forecast.algorithm if run.is_faster else self.alone.name,
            "reason": reason,
        }

    def to_html(self) -> str:
        """Return the plan as a page, with the speed-ups as bars."""
        notes = "".join(
            f"<p>{html.escape(line)}</p>" for line in (*self.notes, *self._memory_line(), *CAPTION.split("\n"))
        )
        table = render_table(COLUMNS, [*self.rows()])
        body = f"<p><b>Take {html.escape(self.recommended[1])}</b></p>{self._bars()}{table}"
        return render_page(f"Plan: {self.title}", f"{body}{notes}")

    def _bars(self) -> str:
        pairs = [(self.alone.name, 1.0), *((run.forecast.algorithm, run.speed_up) for run in self.runs)]
        most = max(speed_up for _, speed_up in pairs)
        drawn = []
        for index, (name, speed_up) in enumerate(pairs):
            top, width = _HIGH * index, _BAR * speed_up / most
            drawn.append(
                f'<text x="{_LABEL - 8}" y="{top + 15}" text-anchor="end">{html.escape(name)}</text>'
                f'<rect x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_HIGH - 6}" '
                f'fill="{COLOURS[index > 0]}"/>'
                f'<text x="{_LABEL + width + 6:.1f}" y="{top + 15}">{speed_up:.2f}</text>'
            )
        size = f'width="{_LABEL + _BAR + 60}" height="{_HIGH * len(pairs)}" font-size="13"'
        return f"<svg {size}>{''.join(drawn)}</svg>"


def _profile_notes(profile: Profile, batch_size: int, count: int | None) -> list[str]:
    """Return lines about what was measured here, for ``count`` machines like this one; None: they are described."""
    step = profile.worker_step(batch_size)
    measured = (
        f"measured here: step_ms = {_ms(step.seconds(batch_size))}, overhead_ms = {_ms(step.alpha_s)}, "
        f"apply_ms = {_ms(profile.apply_s)}"
    )
    if count:
        measured += f"; {count} machines like this one, each to itself" if count > 1 else "; this machine alone"
    worker, plain = profile.worker, profile.plain
    if worker is not None and plain is None:
        return [measured, "no fit of Keras was measured, because it would need the tables in this process"]
    if worker is None or plain is None:
        return [measured, "no worker and no fit of Keras were measured, because the data are not dense arrays"]
    share = 100 * worker.overhead_share
    found = [
        measured,
        f"epochs of {plain.steps} steps: {_ms(plain.step_s)} ms a step in plain Keras, {_ms(worker.epochs.step_s)} ms "
        f"on one worker with one shard; {share:.0f} % of these are not computation ({_ms(worker.exchange_s)} ms of "
        f"each step, {_ms(worker.epoch_end_s)} ms of each epoch)",
    ]
    if worker.overhead_share >= DOMINANT_SHARE:
        found.append(
            f"overhead rules: {share:.0f} % of a worker's time here. With steps of {_ms(worker.quiet_step_s)} ms of "
            f"computation or more (larger batches, a larger model) it would be less than {100 * DOMINANT_SHARE:.0f} %"
        )
    return found


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


@click.command(cls=ScriptCommand)
@click.option("--workers", metavar="N", help="So many machines like this one.")
@click.option("--cluster", "file", type=click.Path(path_type=Path), help="Instead: what the workers are like, TOML.")
@click.option("--job", metavar="ID", help="Instead: the workers that a job of a server has measured.")
@algorithms_option(",".join(PRESETS), "Presets; all of them.")
@settings_option()
@format_option("How to print.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan as a page too.")
@server_options
@script_argument(required=False)
def plan(
    workers: str | None,
    file: Path | None,
    job: str | None,
    algorithms: list[str],
    settings: dict[str, str],
    format_: str,
    page: Path | None,
    script: Script | None,
    **server: Any,
) -> None:
    """Predict how much faster than plain Keras each algorithm would train SCRIPT, and say which to take.

    SCRIPT runs up to its first model.fit, which tells batch size, samples and the model's size; a few of its steps are
    measured here unless --cluster says how long they take. Nothing is trained. With --job, which takes no SCRIPT, the
    workers are those that a job has measured.
    """
    log_to_stderr("warning")
    if sum(each is not None for each in (workers, file, job)) > 1 or (job is None) == (script is None):
        raise UsageError("plan: expected [--workers N | --cluster FILE] SCRIPT, or --job ID.")
    described = read_cluster(file) if file else None
    given = {**settings, "workers": described.count if described else workers}
    chosen = resolve_each(given, algorithms)
    notes: list[str] = []
    if script is None:
        costs, work = _work_of_job(str(job), **server)
    else:
        count = chosen[0].cluster.workers
        alike = {"workers": [{"count": count, "speed": 1.0}], "shards": {"count": chosen[0].cluster.shards}}
        cluster = described or parse_cluster(alike)
        work = _captured_work(script, chosen[0], profiled=cluster.is_relative)
        if work.profile:
            notes += _profile_notes(work.profile, work.batch_size, None if file else count)
            cluster = cluster.measured(work.profile.worker_step(work.batch_size), work.batch_size, work.profile.apply_s)
        if not cluster.has_links:
            notes.append(
                f"no link is described: exchanging 2 x {format_bytes(work.exchanged_bytes)} per step is taken as free"
            )
        costs = costs_of(cluster, work.batch_size, work.exchanged_bytes)
    usable = [each.algorithm for each in chosen if suits(each.algorithm, len(costs.workers))]
    if idle := ", ".join(each.algorithm.name for each in chosen if each.algorithm not in usable):
        notes.append(f"left out, because they are for several workers: {idle}")
    if work.tables.weights:
        notes.append(f"tables that shards make: a batch exchanges {format_bytes(work.tables.row_bytes)} of their rows")
        dense = [each for each in usable if not each.rows]
        usable = [each for each in usable if each.rows]
        if idle := ", ".join(each.name for each in dense):
            notes.append(f"left out, because these tables travel by rows only: {idle}")
    if not usable:
        raise UsageError(f"--algorithm: expected one that one worker can use, as {DEFAULT_PRESET}. Received: {idle}.")
    report = PlanReport(work, len(costs.workers), *_forecasts(work, costs, usable), notes)
    if script is not None:
        best = next(each for each in usable if each.name == report.recommended[0].forecast.algorithm)
        report = replace(report, memory=_memory_of(work, best, cluster))
    if page is not None:
        write_output("--html", page, report.to_html())
    click.echo(json.dumps(report.to_json(), indent=2) if format_ == "json" else report.text())


def _forecasts(
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


def _memory_of(work: ProfiledWork, algorithm: AlgorithmSpec, cluster: ClusterDescription) -> list[MachineMemory]:
    """Return the memory of a job on each machine."""
    machines = [worker.machine for worker in cluster.each()]
    tables = 4 * work.tables.weights
    size = ModelBytes(4 * work.weights, work.state_bytes, tables, tables, work.tables.state_bytes)
    return by_machine(size, algorithm, machines, cluster.shards.count)


def _captured_work(script: Script, options: Options, *, profiled: bool) -> ProfiledWork:
    """Return the size of the script's first ``fit``."""
    with exiting_as_python():
        require_tensorflow("trial steps compute")
        with quiet_start():
            from nfdt.cli.profiling import first_fit

        work = first_fit(script, options, profiled=profiled)
    if work is None:
        raise UsageError(f"{script}: expected a script that calls model.fit. It ended without.")
    return work


def _work_of_job(job: str, **server: Any) -> tuple[Cluster, ProfiledWork]:
    """Return the costs of a job's workers, and its work per epoch."""
    with open_connection(**server) as connection:
        workers = json.loads(connection.show(job).workers_json or "{}")
        ends = [event.data for event in connection.recorded(job) if event.kind == "epoch_end"]
    costs = measured_cluster(workers)
    if costs is None or not ends:
        raise UsageError(f"Job {job}: expected one that has ended an epoch. Received: nothing is measured yet.")
    return costs, ProfiledWork(costs.local_batch, int(ends[-1]["samples"]), 0)
