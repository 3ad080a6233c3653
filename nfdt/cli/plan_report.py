"""Table, JSON and page of a plan: the same numbers in three forms."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nfdt.cli.table import render
from nfdt.core.html_page import COLOURS, render_page, render_table
from nfdt.planning.accuracy import measured_trainings
from nfdt.planning.calibration import RULES, Profile, ProfiledWork
from nfdt.planning.comparison import TOO_HIGH, TOO_HIGH_TOGETHER, OneMachine, PlannedRun
from nfdt.planning.forecast import recommend

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
    """

    work: ProfiledWork
    workers: int
    alone: OneMachine
    runs: Sequence[PlannedRun]
    notes: Sequence[str]

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

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table; the first row is that of one machine."""
        alone = self.alone
        first = (alone.name, f"{alone.samples_per_s:,.0f}", "1", "", f"{alone.epoch_s:.2f}", "0", "0", "compute", "0")
        return [first, *map(_cells, self.runs)]

    def text(self) -> str:
        """Return the plan for a terminal."""
        lines = [self.title, *self.notes, render(COLUMNS, self.rows()), CAPTION, f"take {self.recommended[1]}"]
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
            "recommended": run.forecast.algorithm if run.is_faster else self.alone.name,
            "reason": reason,
        }

    def to_html(self) -> str:
        """Return the plan as a page, with the speed-ups as bars."""
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in (*self.notes, *CAPTION.split("\n")))
        body = (
            f"<p><b>Take {html.escape(self.recommended[1])}</b></p>{self._bars()}{render_table(COLUMNS, self.rows())}"
        )
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


def _cells(run: PlannedRun) -> tuple[str, ...]:
    each = run.forecast
    return (
        each.algorithm,
        f"{each.samples_per_s:,.0f}",
        f"{run.speed_up:.2f}",
        f"{run.low:.2f} - {run.high:.2f}",
        f"{each.epoch_s:.2f}",
        f"{each.staleness:.1f}",
        f"{each.most_staleness:.1f}",
        str(run.bottleneck),
        str(each.loss),
    )


def profile_notes(profile: Profile, batch_size: int, count: int | None) -> list[str]:
    """Return lines about what was measured here.

    Args:
        profile: What was measured.
        batch_size: Samples of a batch.
        count: Number of machines like this one; None: they are described.
    """
    step = profile.worker_step(batch_size)
    measured = f"step_ms = {_ms(step.seconds(batch_size))}, overhead_ms = {_ms(step.alpha_s)}"
    measured = f"measured here: {measured}, apply_ms = {_ms(profile.apply_s)}"
    if count:
        measured += f"; {count} machines like this one, each to itself" if count > 1 else "; this machine alone"
    worker, plain = profile.worker, profile.plain
    if worker is None or plain is None:
        return [measured, "no worker and no fit of Keras were measured, because the data are not dense arrays"]
    share = 100 * worker.overhead_share
    found = [
        measured,
        f"epochs of {plain.steps} steps: {_ms(plain.step_s)} ms a step in plain Keras, {_ms(worker.epochs.step_s)} ms "
        f"on one worker with one shard; {share:.0f} % of these are not computation ({_ms(worker.exchange_s)} ms of "
        f"each step, {_ms(worker.epoch_end_s)} ms of each epoch)",
    ]
    if worker.overhead_share >= RULES:
        found.append(
            f"overhead rules: {share:.0f} % of a worker's time here. With steps of {_ms(worker.quiet_step_s)} ms of "
            f"computation or more (larger batches, a larger model) it would be less than {100 * RULES:.0f} %"
        )
    return found


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
