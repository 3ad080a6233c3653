"""``nfdt chaos``: a script trains on a local cluster while faults are injected."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nfdt.cli.options import FILE, ScriptCommand, script_argument, write_output
from nfdt.cli.process import end_on_sigterm
from nfdt.cli.script import Script
from nfdt.cli.table import render
from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_server_packages

if TYPE_CHECKING:
    from nfdt.chaos.report import ChaosReport, FaultOutcome
    from nfdt.chaos.trial import TrialRecord

SURVIVED = {True: "yes", False: "NO", None: "not injected"}
COLUMNS = ("fault", "target", "at s", "recovery s", "survived")


def describe_report(report: ChaosReport) -> str:
    """Return the report as text."""
    lines = [render(COLUMNS, [_row(fault) for fault in report.faults], left=2)] if report.faults else []
    growth = report.memory_growth
    found = {"the job's events": report.samples, "the weights of the counting model": report.counted}
    lines += [
        f"samples, from {where}: {counts.once} trained once, {counts.again} again, {counts.never} never"
        for where, counts in found.items()
        if counts is not None
    ]
    if report.why_not_counted:
        lines.append(f"samples, from weights: not counted, as {report.why_not_counted}")
    if report.undisturbed is not None:
        lines.append(f"result without faults: {_numbers(report.undisturbed)}")
    lines.append(f"result: {_numbers(report.result)}")
    lines.append(f"left over: {', '.join(report.leftovers) or 'nothing'}")
    if growth is not None:
        lines.append(f"memory of the server between first and last fault: {growth:+.1%}")
    if report.more_files is not None:
        lines.append(f"open files of the server in that time: {report.more_files:+}")
    return "\n".join([*lines, *(f"problem: {one}" for one in report.problems)])


def _row(fault: FaultOutcome) -> tuple[str, ...]:
    target = fault.role if fault.target is None else f"{fault.role} {fault.target}"
    times = ["-" if seconds is None else f"{seconds:.1f}" for seconds in (fault.at_s, fault.recovery_s)]
    return (fault.kind, target, *times, SURVIVED[fault.survived])


def _numbers(logs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in logs.items()) or "none"


def _new_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(
            f"--logs: expected a folder that does not exist and can be made. Received: {path} ({error.strerror}). Name "
            "another one."
        ) from None
    return path


@click.command(cls=ScriptCommand)
@click.argument("schedule", type=FILE)
@script_argument(required=False)
@click.option("--compare", is_flag=True, help="Run the script without faults first, and show both results.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report there.")
@click.option("--logs", type=click.Path(path_type=Path), help="New folder for the logs; kept in any case.")
@click.option("--patience", type=click.FloatRange(1), default=300.0, show_default=True, metavar="SECONDS")
def chaos(
    schedule: str, script: Script | None, compare: bool, json_file: Path | None, logs: Path | None, patience: float
) -> None:
    """Run SCRIPT on a cluster of this machine, inject the faults of SCHEDULE, and report what became of each.

    Then a model whose weights count its samples is trained under the same schedule; without SCRIPT, only that model.
    A trial is given up when a job reports nothing for --patience seconds.
    The exit code is 0 only if every fault was injected and survived, every sample was trained, the counts are exact,
    and nothing is left.
    """
    require_server_packages("nfdt chaos")
    from nfdt.chaos.accounting import counting_options, counting_script, length_for, why_not_counted
    from nfdt.chaos.report import make_report
    from nfdt.chaos.schedule import plan_faults, read_schedule
    from nfdt.chaos.trial import local_trial

    end_on_sigterm()
    plan = read_schedule(Path(schedule))
    reason = why_not_counted(plan.cluster.options)
    if script is None and (reason or compare):
        raise UsageError(
            f"SCRIPT: expected one, as {reason or '--compare compares its results'}. Received: none. Add a script."
        )
    folder = Path(tempfile.mkdtemp(prefix="nfdt-chaos-")) if logs is None else _new_folder(logs.absolute())

    def run(name: str, words: Sequence[str], **changes: Any) -> TrialRecord:
        chosen = plan.model_copy(update=changes)
        return local_trial(
            chosen, words, folder / name, patience_s=patience, log=lambda line: click.echo(line, err=True)
        ).run()

    undisturbed = record = counted = counts = None
    if script is not None:
        words = script.words
        undisturbed = run("undisturbed", words, fault=()) if compare else None
        record = run("chaos", words)
    if not reason:
        counts = folder / "counts.json"
        (folder / "counting.py").write_text(counting_script(counts, **length_for(plan_faults(plan))), encoding="utf-8")
        cluster = plan.cluster.model_copy(update={"options": counting_options(plan.cluster.options)})
        counted = run("counting", [str(folder / "counting.py")], cluster=cluster)
    record, counting = (counted, None) if record is None else (record, counted)
    assert record is not None, "a script is required where weights do not count"
    report = make_report(record, undisturbed, counting=counting, counts=counts, why_not_counted=reason)
    if json_file is not None:
        write_output("--json", json_file, json.dumps(report.as_json(), indent=1) + "\n")
    click.echo(describe_report(report))
    if report.survived and logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        click.echo(f"logs in {folder}", err=True)
    sys.exit(0 if report.survived else 1)
