"""Verdicts: whether distributed trainings of a script end where those on one machine end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's distribution by degrees of freedom; 1.96 from the last one on.
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}
WITHIN, NOTHING = "within noise of plain", "did not train"
LEARNT = 0.1  # least part of what plain Keras learns after its first epoch that counts as training


@dataclass(frozen=True)
class CurvePoint:
    """End of an epoch: seconds since the fit began, and the metric."""

    seconds: float
    value: float


Curve = Sequence[CurvePoint]


@dataclass(frozen=True)
class Metric:
    """Metric that is compared.

    Attributes:
        name: Its name in the logs.
        lower_is_better: Whether smaller values are better.
    """

    name: str
    lower_is_better: bool

    def gain(self, value: float, over: float) -> float:
        """Return by how much a value is better than another one; negative if it is worse."""
        return over - value if self.lower_is_better else value - over


def choose_metric(names: Sequence[str], wanted: str | None = None) -> Metric:
    """Return the metric to compare: the one that is wanted, else that of the validation, else of the training.

    A metric other than the loss is preferred.

    Raises:
        ValueError: the wanted metric is not among the names, or there are none.
    """
    if wanted is not None and wanted not in names:
        raise ValueError(f"expected one of {', '.join(names)}")
    if not names:
        raise ValueError("expected a fit that reports a number after each epoch")
    chosen = wanted or min(names, key=lambda name: (not name.startswith("val_"), name.endswith("loss"), name))
    falls = any(word in chosen for word in ("loss", "error", "mse", "mae", "rmse", "divergence", "perplexity"))
    return Metric(chosen, falls)


@dataclass(frozen=True)
class Comparison:
    """Result of an algorithm beside that of plain Keras.

    Attributes:
        verdict: ``within noise of plain``, ``higher by x ± y``, ``lower by x ± y``, or ``did not train``.
        final: Mean of the metric after the last epoch; NaN if a repetition ended so.
        difference: Final value minus that of plain Keras.
        margin: Half the 95 % confidence interval of the difference; infinite with one repetition.
        worse_by: How much worse the final value is than that of plain Keras; negative if it is better.
        speed_up: How many times faster an epoch is, the first one excluded; NaN if there is only one.
        seconds_to_plain: Median of the seconds until the metric is as good as plain Keras' mean final value; None if
            it never is in half of the repetitions.
    """

    verdict: str
    final: float
    difference: float
    margin: float
    worse_by: float
    speed_up: float
    seconds_to_plain: float | None

    def misses(self, tolerance: float) -> bool:
        """Whether the result is worse than that of plain Keras by more than a tolerance, or there is none."""
        return not self.worse_by <= tolerance


def compare(metric: Metric, plain: Sequence[Curve], other: Sequence[Curve]) -> Comparison:
    """Compare repetitions of a training; each has at least one epoch."""
    goal = statistics.fmean(_finals(plain))
    final = statistics.fmean(_finals(other))
    difference, margin = final - goal, _margin(_finals(plain), _finals(other))
    return Comparison(
        _verdict(metric, plain, final, difference, margin),
        final,
        difference,
        margin,
        -metric.gain(final, goal),
        epoch_s(plain) / epoch_s(other),
        seconds_to(metric, goal, other),
    )


def seconds_to(metric: Metric, goal: float, curves: Sequence[Curve]) -> float | None:
    """Return the median of the seconds until the metric reaches a goal; None if half of the curves never do."""
    reached = [
        next((epoch.seconds for epoch in curve if metric.gain(epoch.value, goal) >= 0), math.inf) for curve in curves
    ]
    median = statistics.median(reached)
    return None if math.isinf(median) else median


def epoch_s(curves: Sequence[Curve]) -> float:
    """Return the median duration of an epoch, the first of each training excluded; NaN if there is no other."""
    durations = [
        after.seconds - before.seconds for curve in curves for before, after in zip(curve, curve[1:], strict=False)
    ]
    return statistics.median(durations) if durations else math.nan


def _verdict(metric: Metric, plain: Sequence[Curve], final: float, difference: float, margin: float) -> str:
    first, goal = statistics.fmean([curve[0].value for curve in plain]), statistics.fmean(_finals(plain))
    learnt = metric.gain(goal, first)
    if math.isnan(final):
        return NOTHING
    if difference and math.isinf(margin):
        return f"{'higher' if difference > 0 else 'lower'} by {abs(difference):.4g}, one repetition"
    # Within the noise, a result is that of plain Keras even where neither of them learnt.
    if abs(difference) <= margin:
        return WITHIN
    if learnt > 0 and metric.gain(final, first) < learnt * LEARNT:
        return NOTHING
    return f"{'higher' if difference > 0 else 'lower'} by {abs(difference):.4g} ± {margin:.2g}"


def _finals(curves: Sequence[Curve]) -> list[float]:
    return [curve[-1].value for curve in curves]


def _margin(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the 95 % confidence interval of the difference of two means (Welch, with the smaller sample's df).

    The least positive float is added, so that equal values are within it.
    """
    least = min(len(one), len(other))
    if least < 2:
        return math.inf
    error = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    quantile = next((value for df, value in reversed(_STUDENT.items()) if df <= least - 1), 1.96)
    return quantile * error + math.ulp(0.0)
