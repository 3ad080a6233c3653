"""The results of a simulated job as JSON, CSV and a picture, independent of the machine that simulates."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nfdt.planning.limits import lower_bound, of_lower_bound
from nfdt.simulate.cluster import ClusterDescription
from nfdt.simulate.job import SimulatedJob
from nfdt.simulate.machines import Machine

NOISES = (1, 10, 100)
DIGITS = 9  # of virtual seconds


def described_limits(cluster: ClusterDescription, batch_size: int) -> dict[str, Any]:
    """Return the sum of the workers' own speeds, and the known lower time bound of asynchronous methods.

    Speeds are the described ones, without drift, pauses and failures.
    """
    seconds = _gradient_s(cluster, batch_size)
    bounds = {str(noise): lower_bound(seconds, noise) for noise in NOISES}
    return {
        "samples_per_s": sum(batch_size / s for s in seconds),
        "lower_bound": {noise: {"seconds": b.seconds, "workers": b.workers} for noise, b in bounds.items()},
    }


def _gradient_s(cluster: ClusterDescription, batch_size: int) -> list[float]:
    machines = [Machine(i, w, batch_size, cluster.seed) for i, w in enumerate(cluster.each())]
    return [machine.step.seconds(batch_size) for machine in machines]


def result_of(
    job: SimulatedJob, algorithm: str, cluster: ClusterDescription, workers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of one ended job.

    Args:
        job: The job.
        algorithm: Name of its algorithm.
        cluster: The cluster it ran on.
        workers: ``history.nfdt`` of its fit.
    """
    record, batch = job.record, job.spec.fit.batch_size
    limits, seconds = described_limits(cluster, batch), record.seconds
    speed = record.samples / seconds if seconds else 0.0
    under_way = max(cluster.count, 1 + record.mean_staleness)  # more than one per machine with overlap
    return {
        "algorithm": algorithm,
        "virtual_s": round(seconds, DIGITS),
        "samples": record.samples,
        "samples_per_s": speed,
        "limits": limits,
        "of_limit": speed / limits["samples_per_s"],
        "of_lower_bound": {
            str(noise): of_lower_bound(_gradient_s(cluster, batch), noise, speed / batch, under_way) for noise in NOISES
        },
        "staleness": {str(tau): count for tau, count in sorted(record.staleness.items())},
        "mean_staleness": record.mean_staleness,
        "most_staleness": record.most_staleness,
        "dropped": record.dropped,
        "groups": [{"at_s": round(at_s, DIGITS), **groups} for at_s, groups in record.groups],
        "bytes_sent": sum(int(w.get("bytes_sent", 0)) for w in workers.values()),
        "bytes_received": sum(int(w.get("bytes_received", 0)) for w in workers.values()),
        "machines": [
            {
                "machine": number,
                "samples": use.samples,
                "steps": use.steps,
                "utilisation": use.busy_s / seconds if seconds else 0.0,
            }
            for number, use in sorted(record.machines.items())
        ],
        "workers": dict(workers),
        "curve": [
            {
                "at_s": round(point.at_s, DIGITS),
                "samples": point.samples,
                "epoch": point.epoch,
                "ends_epoch": point.ends_epoch,
                "logs": dict(point.logs),
            }
            for point in record.points
        ],
    }


def to_json(results: Sequence[Mapping[str, Any]]) -> str:
    """Format all results of a command as JSON; the same run gives the same text."""
    return json.dumps({"results": list(results)}, indent=1, sort_keys=True) + "\n"


def curves_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the curves as CSV, one line per point of every curve."""
    names = sorted({name for r in results for point in r["curve"] for name in point["logs"]})
    rows = [
        [r["algorithm"], r["fit"], p["at_s"], p["samples"], p["epoch"], int(p["ends_epoch"])]
        + [p["logs"].get(name, "") for name in names]
        for r in results
        for p in r["curve"]
    ]
    return _csv(["algorithm", "fit", "virtual_s", "samples", "epoch", "ends_epoch", *names], rows)


def staleness_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """Format as CSV the number of gradients by the number of updates they missed."""
    rows = [[r["algorithm"], r["fit"], tau, count] for r in results for tau, count in r["staleness"].items()]
    return _csv(["algorithm", "fit", "staleness", "gradients"], rows)


def machines_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the work of each machine as CSV."""
    columns = ("machine", "samples", "steps", "utilisation")
    rows = [[r["algorithm"], r["fit"], *(m[name] for name in columns)] for r in results for m in r["machines"]]
    return _csv(["algorithm", "fit", *columns], rows)


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


# Okabe and Ito's palette, distinguishable with any colour vision; line styles and markers encode the same information.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Result = Mapping[str, Any]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def metric_of(results: Sequence[Result]) -> str | None:
    """Return the first metric besides the loss that every curve has, preferably of the validation; None if none."""
    shared = set.intersection(*({n for p in r["curve"] if p["ends_epoch"] for n in p["logs"]} for r in results))
    names = sorted(shared - {"loss", "val_loss"}, key=lambda name: (not name.startswith("val_"), name))
    return names[0] if names else None


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot for each result loss and metric over virtual time and samples, staleness, and utilisation; write a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    metric = metric_of(results)
    for row, (key, label) in enumerate((("at_s", "virtual time (s)"), ("samples", "samples trained"))):
        _curves(axes[row][0], results, key, "loss")
        axes[row][0].set(xlabel=label, ylabel="training loss, mean of the epoch so far")
        if metric is not None:
            _curves(axes[row][1], results, key, metric)
        axes[row][1].set(xlabel=label, ylabel=metric or "no metric")
    _staleness(axes[0][2], results)
    _utilisation(axes[1][2], results)
    axes[0][0].legend(fontsize="small")
    for each in axes.flat:
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index // len(COLOURS) % len(LINES)]}


def _curves(axes: Any, results: Sequence[Result], key: str, name: str) -> None:
    for index, result in enumerate(results):
        points = [p for p in result["curve"] if name in p["logs"] and (p["ends_epoch"] or name == "loss")]
        x, y = [p[key] for p in points], [p["logs"][name] for p in points]
        marker = MARKERS[index % len(MARKERS)] if len(points) <= 20 else ""
        axes.plot(x, y, marker=marker, markersize=4, label=result["name"], **_style(index))


def _staleness(axes: Any, results: Sequence[Result]) -> None:
    for index, result in enumerate(results):
        counts = {int(tau): count for tau, count in result["staleness"].items()}
        total, taus = sum(counts.values()), range(max(counts, default=0) + 2)
        shares = [100 * counts.get(tau, 0) / max(1, total) for tau in taus]
        axes.step(list(taus), shares, where="mid", **_style(index))
    axes.set(xlabel="staleness (updates missed)", ylabel="gradients (%)", ylim=(0, None))


def _utilisation(axes: Any, results: Sequence[Result]) -> None:
    for index, result in enumerate(results):
        x = [m["machine"] for m in result["machines"]]
        y = [100 * m["utilisation"] for m in result["machines"]]
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(x, y, marker=marker, markersize=4, alpha=0.8, **_style(index))
    axes.set(xlabel="worker", ylabel="time computing (%)", ylim=(0, 105))
