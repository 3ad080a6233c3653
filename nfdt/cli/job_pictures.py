"""Progress bars of a job's epochs on a terminal, in Keras' style, and pictures of jobs and runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nfdt_client.handle import JobStatus, describe_log, epoch_logs, format_event
from rich.console import Console
from rich.live import Live
from rich.text import Text

from nfdt.cli.table import count_of
from nfdt.core.errors import NotInstalled, UsageError
from nfdt.core.events import Event
from nfdt.core.host.packages import install

if TYPE_CHECKING:
    from nfdt_client.run_history import KeptRun

WIDTH = 20  # of a bar, in characters
SUFFIXES = (".png", ".svg", ".pdf")


def draw_progress(events: Iterable[Event], out: TextIO, epochs: int) -> None:
    """Draw events as they come: on a terminal a bar for each epoch, which stays below other lines; else lines alone.

    Args:
        events: Events of a job.
        out: Where to write; a terminal, or a file.
        epochs: Number of epochs of the job.
    """
    if not out.isatty():
        for event in events:
            print(format_event(event), file=out, flush=True)
        return
    begun = Event(0, 0.0, "epoch_begin", {})
    with Live(console=Console(file=out), auto_refresh=False, transient=True) as live:
        for event in events:
            if event.kind == "progress":
                live.update(_bar(event, begun), refresh=True)
                continue
            line: str | Text = format_event(event)
            if event.kind == "epoch_begin":
                begun, line = event, f"Epoch {event.data['epoch'] + 1}/{epochs}"
            elif event.kind == "epoch_end":
                live.update("")
                line = _bar(event, begun)
            live.console.print(line, soft_wrap=True, markup=False, highlight=False)


def _bar(event: Event, begun: Event) -> Text:
    """Return the bar of an epoch: after some of its steps with the time that is left, else with its duration."""
    data, over = event.data, event.kind == "epoch_end"
    steps = int(data.get("steps") or 0)
    seconds = float(data.get("seconds") or 0.0) if over else event.at - begun.at
    logs = epoch_logs(data) if over else data.get("logs") or {}
    step_s = seconds / steps if steps else 0.0
    total = steps if over else begun.data.get("steps")
    filled = WIDTH if over else int(WIDTH * min(1.0, steps / total)) if total else 0
    left_s = seconds if over else step_s * max(0, (total or steps) - steps)
    numbers = "".join(f" - {name}: {describe_log(value)}" for name, value in logs.items())
    clock = f"{_clock(left_s)} {step_s * 1000:.0f}ms/step"
    bar = "━" * filled + "─" * (WIDTH - filled)
    return Text(f"{steps}/{total or 'Unknown'} {bar} {clock}{numbers}", no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    """Format seconds as Keras does: 12s, 3:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


def plot_job(status: JobStatus, events: Sequence[Event], path: Path) -> None:
    """Plot the metrics of each epoch and the speed of each worker into a file.

    Args:
        status: Description of the job.
        events: All events of the job.
        path: The file.

    Raises:
        UsageError: the suffix of the file is unknown, or the job has ended no epoch.
        NotInstalled: matplotlib is missing.
    """
    epochs = {event.data["epoch"] + 1: epoch_logs(event.data) for event in events if event.kind == "epoch_end"}
    if not epochs:
        raise UsageError(f"Job {status.job_id}: expected an epoch that has ended. Received: none so far.")
    names = _metrics(next(reversed(epochs.values())))
    figure, axes = _new_figure(path, len(names) + 1)
    for each, name in zip(axes, names, strict=False):
        for label in (name, f"val_{name}"):
            points = [(epoch, logs[label]) for epoch, logs in epochs.items() if isinstance(logs.get(label), float)]
            if points:
                each.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        each.set(xlabel="epoch", ylabel=name)
        each.legend(fontsize="small")
    _speeds(axes[-1], events)
    name, workers = status.given_name or status.job_id, count_of(status.workers, "worker")
    figure.suptitle(f"{name}: {status.algorithm}, {workers}, {status.state}")
    figure.savefig(path, dpi=120)


def plot_runs(runs: Sequence[KeptRun], path: Path) -> None:
    """Plot the metrics of several runs into a file: each by epoch, and the loss, or else the first one, by time.

    Validation metrics are dashed.

    Args:
        runs: The runs.
        path: The file.

    Raises:
        UsageError: the suffix of the file is unknown, or no epoch of a run has ended.
        NotInstalled: matplotlib is missing.
    """
    names = list({name: None for run in runs if run.epochs for name in _metrics(run.epochs[-1]["logs"])})
    if not names:
        raise UsageError("--output: expected a run with an epoch that has ended. Received: none.")
    timed = "loss" if "loss" in names else names[0]
    figure, axes = _new_figure(path, len(names) + 1)
    for number, run in enumerate(runs):
        for each, name in zip(axes, names, strict=False):
            _draw_metric(each, run, name, [epoch["epoch"] + 1 for epoch in run.epochs], f"C{number}")
        if all(epoch.get("seconds") for epoch in run.epochs):
            _draw_metric(axes[-1], run, timed, list(accumulate(e["seconds"] for e in run.epochs)), f"C{number}")
    for each, name in zip(axes, [*names, timed], strict=True):
        each.set(xlabel="epoch" if each is not axes[-1] else "seconds", ylabel=name)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_metric(axes: Any, run: KeptRun, name: str, at: Sequence[float], color: str) -> None:
    """Draw a metric of a run's epochs over ``at``, and its validation as a dashed line."""
    for metric, style in ((name, "-"), (f"val_{name}", "--")):
        values = [epoch["logs"].get(metric) for epoch in run.epochs]
        points = [(x, value) for x, value in zip(at, values, strict=True) if isinstance(value, float)]
        if points:
            label = f"{run.id}: {run.algorithm}" if metric == name else None
            axes.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3, label=label)


def _metrics(logs: Mapping[str, Any]) -> list[str]:
    """Return the names of the training metrics."""
    return [name for name in logs if not name.startswith("val_")]


def _new_figure(path: Path, columns: int) -> tuple[Any, Any]:
    """Return a figure for a file, and its axes, which stand beside each other."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output: expected a name that ends in {', '.join(SUFFIXES)}. Received: {path}.")
    if find_spec("matplotlib") is None:
        raise NotInstalled(f"Pictures need matplotlib. Install it: {install('plots')}")
    # Not pyplot: it would choose a backend with windows, and keep figures for the rest of the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * columns, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _speeds(axes: Any, events: Sequence[Event]) -> None:
    """Draw the measured samples per second of each worker."""
    speeds: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.kind == "speed":
            for worker, entry in event.data["workers"].items():
                speeds.setdefault(worker, []).append((event.at - events[0].at, entry["samples_per_s"]))
    for worker, points in sorted(speeds.items()):
        axes.step(*zip(*points, strict=True), where="post", label=worker)
    axes.set(xlabel="seconds since the job was submitted", ylabel="samples/s", ylim=(0, None))
    if 0 < len(speeds) <= 12:
        axes.legend(fontsize="small")
