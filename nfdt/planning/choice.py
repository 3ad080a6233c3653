"""Choice of the preset with the most progress per second; it is kept unless another one is clearly better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.planning.cost_model import Cluster, PlannedPreset, Prediction, predict
from nfdt.schedulers.batch_policies import find_batch_policy

BETTER = 1.1  # ratio of predicted progress from which a running job changes its preset


@dataclass(frozen=True)
class PlanChoice:
    """A preset, its prediction, and the reason for the choice."""

    preset: PlannedPreset
    prediction: Prediction
    reason: str


def choose(cluster: Cluster, presets: Sequence[PlannedPreset], *, current: PlannedPreset | None = None) -> PlanChoice:
    """Return the best preset for measured workers; of equally good ones the first.

    Args:
        cluster: The workers.
        presets: Presets to choose from, at least one.
        current: Current preset, kept unless another one is predicted to make ``BETTER`` times its progress.
    """
    presets = presets if current is None or current in presets else [current, *presets]
    predictions = {preset: predict(preset, cluster) for preset in presets}
    best = max(presets, key=lambda preset: predictions[preset].progress_per_s)
    if current is not None and predictions[best].progress_per_s < BETTER * predictions[current].progress_per_s:
        best = current
    return PlanChoice(best, predictions[best], _sentence(cluster, best, predictions[best]))


def _sentence(cluster: Cluster, preset: PlannedPreset, chosen: Prediction) -> str:
    steps = [w.step.seconds(cluster.local_batch) for w in cluster.workers]
    barrier = predict(PlannedPreset("bsp", "fixed"), cluster)
    return (
        f"{_named(preset)}: {len(steps)} workers take {_range_ms(steps)} per batch of {cluster.local_batch} and "
        f"{_range_ms([w.exchange_s for w in cluster.workers])} to exchange; expected {chosen.samples_per_s:,.0f} "
        f"samples/s, {chosen.samples_per_s / barrier.samples_per_s:.1f} times a barrier's, "
        f"at a mean staleness of {chosen.staleness:.1f}."
    )


def _named(preset: PlannedPreset) -> str:
    if preset.groups:
        return f"groups {' | '.join(','.join(map(str, members)) for members in preset.groups)}"
    batches = find_batch_policy(preset.batch).adjective
    return f"free workers with {batches} batches, overlap {preset.overlap}"


def _range_ms(seconds: Sequence[float]) -> str:
    low, high = min(seconds) * 1000, max(seconds) * 1000
    return f"{low:.3g} ms" if high < 1.05 * low or high == 0 else f"{low:.3g} to {high:.3g} ms"
