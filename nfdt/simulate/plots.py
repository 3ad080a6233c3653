"""Plot of results as one picture, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
