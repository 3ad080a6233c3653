"""Picture of a job: its metrics by epoch, and the speed of each worker over time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nfdt_client.handle import JobStatus, epoch_logs

from nfdt.cli.table import count_of
from nfdt.core.errors import NotInstalled, UsageError
from nfdt.core.events import Event

SUFFIXES = (".png", ".svg", ".pdf")


def plot_job(status: JobStatus, events: Sequence[Event], path: Path) -> None:
    """Draw the picture into a file.

    Args:
        status: Description of the job.
        events: All events of the job.
        path: The file.

    Raises:
        UsageError: the suffix of the file is unknown, or the job has ended no epoch.
        NotInstalled: matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output: expected a name that ends in {', '.join(SUFFIXES)}. Received: {path}.")
    if find_spec("matplotlib") is None:
        raise NotInstalled("nfdt jobs plot needs matplotlib. Install it: pip install matplotlib")
    epochs = {event.data["epoch"] + 1: epoch_logs(event.data) for event in events if event.kind == "epoch_end"}
    if not epochs:
        raise UsageError(f"Job {status.job_id}: expected an epoch that has ended. Received: none so far.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in next(reversed(epochs.values())) if not name.startswith("val_")]
    figure = Figure(figsize=(4.5 * (len(names) + 1), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names) + 1, squeeze=False)[0]
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
