"""``nfdt parity``: whether a script that is distributed ends where plain Keras ends, and when."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from nfdt_client.options import resolve_each

from nfdt.cli.options import (
    ScriptCommand,
    algorithms_option,
    log_to_stderr,
    script_argument,
    settings_option,
    write_output,
)
from nfdt.cli.script import Script, describe_failure, exit_code_of, run_script
from nfdt.cli.table import count_of, render
from nfdt.core.errors import JobFailed, UsageError
from nfdt.core.host.startup import quiet_start
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.parity.report import PLAIN, render_html, table
from nfdt.parity.verdict import Comparison, Curve, CurvePoint, Metric, choose_metric, compare

_Fits = list[list[dict[str, Any]]]
COLUMNS = ("algorithm", "verdict", "metric", "difference", "speed-up", "s to plain")


def _train(script: Script, repetition: int, options: Mapping[str, Any] | None, what: str) -> _Fits:
    """Train once in a process of its own, see :func:`_train_here`, with the script's own output."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "fits.json"
        command = [sys.executable, "-m", "nfdt.cli.parity", str(result), str(repetition), json.dumps(options)]
        done = subprocess.run([*command, *script.words], stdout=sys.stderr)
        if done.returncode or not result.exists():
            raise JobFailed(f"parity: {what}, repetition {repetition + 1}: the script ended with {done.returncode}.")
        fits: _Fits = json.loads(result.read_text(encoding="utf-8"))
    if not fits or not fits[-1]:
        raise UsageError(f"parity: {what}: expected a script that calls model.fit. Received: one without an epoch.")
    return fits


def _curve(fits: _Fits, metric: Metric) -> Curve:
    """Return the curve of the script's last fit."""
    return [CurvePoint(epoch["seconds"], epoch["logs"].get(metric.name, math.nan)) for epoch in fits[-1]]


def _chosen(fits: _Fits, wanted: str | None) -> Metric:
    try:
        return choose_metric(sorted(fits[-1][0]["logs"]), wanted)
    except ValueError as error:
        raise UsageError(f"--metric: {error}. Received: {wanted or 'none'}.") from None


def _to_json(metric: Metric, curves: Mapping[str, Sequence[Curve]], found: Mapping[str, Comparison]) -> str:
    plain = {name: [[asdict(epoch) for epoch in curve] for curve in each] for name, each in curves.items()}
    results = {name: asdict(each) for name, each in found.items()}
    return json.dumps({"metric": asdict(metric), "results": results, "curves": plain}, indent=2)


@click.command(cls=ScriptCommand)
@click.option("--workers", metavar="N", help="How many workers train.")
@algorithms_option(DEFAULT_PRESET, "Presets.", show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Repetitions of each training.")
@click.option("--metric", metavar="NAME", help="Of the logs; default: one of the validation, not the loss.")
@click.option("--tolerance", type=click.FloatRange(0), help="Exit code 1 if an algorithm is worse by more than this.")
@settings_option()
@click.option("--html", "page", type=click.Path(path_type=Path), help="Write a report with curves there.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all numbers there.")
@script_argument()
def parity(
    script: Script,
    workers: str | None,
    algorithms: list[str],
    seeds: int,
    metric: str | None,
    tolerance: float | None,
    settings: dict[str, str],
    page: Path | None,
    file: Path | None,
) -> None:
    """Train SCRIPT plain and distributed with the same seeds, and compare the results of its last model.fit.

    For example: nfdt parity --workers 4 --algorithm ddc-asgd,bsp --html report.html script.py

    A verdict compares the final metric: within noise of plain, higher or lower by x ± y (95 %), or did not train.
    Seeds that SCRIPT sets by keras.utils.set_random_seed are shifted from one repetition to the next.
    """
    given = {**settings, "workers": workers}
    resolve_each(given, algorithms)  # reports a wrong option before anything is trained
    runs: dict[str, list[_Fits]] = {PLAIN: [], **{name: [] for name in algorithms}}
    # One repetition of each before the next: load that comes and goes on the machine hits all of them alike.
    for repetition in range(seeds):
        for name, found in runs.items():
            options = None if name == PLAIN else {**given, "algorithm": name}
            click.echo(f"parity: {name}, repetition {repetition + 1} of {seeds}", err=True)
            found.append(_train(script, repetition, options, name))
    chosen = _chosen(runs[PLAIN][0], metric)
    curves = {name: [_curve(fits, chosen) for fits in each] for name, each in runs.items()}
    results = {name: compare(chosen, curves[PLAIN], curves[name]) for name in algorithms}
    click.echo(f"{chosen.name} of the last epoch, mean of {count_of(seeds, 'repetition')}")
    click.echo(render(COLUMNS, table(chosen, curves, results), left=2))
    if page is not None:
        write_output("--html", page, render_html(f"{script}: plain and distributed", chosen, curves, results))
    if file is not None:
        write_output("--json", file, _to_json(chosen, curves, results))
    if tolerance is not None:
        sys.exit(any(each.misses(tolerance) for each in results.values()))


def _train_here(result: str, repetition: str, options: str, *words: str) -> int:
    """Train once in this process, write the fits as JSON, and return the exit code.

    Args:
        result: File for the fits, see :func:`nfdt_client.recorded_fits.recorded_fits`.
        repetition: Number of the repetition, which shifts the seeds.
        options: Options of a session as a JSON object; ``null`` for plain Keras.
        *words: The script as on Python's command line.
    """
    from nfdt_client.decorator import session
    from nfdt_client.recorded_fits import recorded_fits

    log_to_stderr("warning")
    given = json.loads(options)
    try:
        with ExitStack() as stack:
            with quiet_start():
                if given is not None:
                    stack.enter_context(session(options=given))
                fits = stack.enter_context(recorded_fits(int(repetition)))
            run_script(Script.from_words(words))
    except BaseException as error:  # SystemExit and KeyboardInterrupt have exit codes of their own
        if message := describe_failure(error):
            print(message, file=sys.stderr)
        return exit_code_of(error)
    Path(result).write_text(json.dumps(fits), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_train_here(*sys.argv[1:]))
