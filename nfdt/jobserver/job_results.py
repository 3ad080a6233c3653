"""Checkpoints, result and statistics of one job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.statistics import FIRST_LOSS, step_totals
from nfdt.jobserver.job_core import ActiveTraining, JobCore
from nfdt.jobserver.topologies.groups import RECENT, RING

GROWTH = 1e6  # over the least loss before
LEAST = 1.0  # a loss that begins near zero may grow to ordinary size


class JobResults:
    """Writer of a training job's results. Used only by the job's own thread.

    Args:
        core: Core of the job.
        training: Parts that exist during training.
    """

    def __init__(self, core: JobCore, training: ActiveTraining) -> None:
        self._core, self._training = core, training
        self._refused: dict[str, int] = {}
        self._diverges = False
        self._losses: list[float] = []  # the least mean of an epoch so far
        self._trained: list[tuple[int, float]] = []  # samples and seconds of each epoch, without validation
        self._epoch_began = self._steps_ended = 0.0

    def report(self) -> None:
        """Write the statistics as the workers have reported them so far; those of shards are of the last epoch."""
        if self._core.spec.method != "fit":
            return
        statistics = self._statistics(self._core.shard_statistics)
        self._core.job_log.workers_so_far(statistics)
        if self._core.topology.view.pushes and not self._core.shard_statistics:
            return  # a worker cannot tell a gradient that was refused from one of a task that another one has finished
        self._warn_of_refused(statistics)

    def look_for_nan(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Warn about a log that is NaN or infinite."""
        if broken := [name for name, value in logs.items() if isinstance(value, float) and not math.isfinite(value)]:
            self._warn(f"{', '.join(broken)} is not finite in epoch {epoch + 1}.")

    def look_for_growth(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Warn about the loss of an epoch that is out of all proportion to those before."""
        loss = logs.get("loss")
        if not isinstance(loss, float) or not math.isfinite(loss):
            return
        if loss > LEAST:
            rows = self._statistics(self._core.shard_statistics).values()
            before = [*self._losses, *(float(row[FIRST_LOSS]) for row in rows if FIRST_LOSS in row)]
            if has_exploded(loss, before):
                self._warn(f"loss is {loss:.3g} in epoch {epoch + 1}, after {min(before, key=abs):.3g} before.")
        self._losses = [min([*self._losses, loss], key=abs)]

    def epoch_begins(self) -> None:
        """Record the time at which an epoch begins, or has begun before its client permitted it."""
        self._epoch_began = self._training.coordinator.began_at

    def steps_end(self) -> None:
        """Record the time at which all steps of an epoch are done; validation follows."""
        self._steps_ended = self._core.server.clock.now()

    def learning_rate(self) -> float | None:
        """Return the rate of the user's optimizer on the shards or in a ring, else the last that was set, or None."""
        core = self._core
        if core.manifest.local_optimizers is None:
            for shard in core.shard_statistics:
                if "learning_rate" in shard:
                    return float(shard["learning_rate"])
        return core.control.learning_rate

    def compare_forecast(self, epoch: Mapping[str, Any]) -> None:
        """Record the measured speed beside the job's forecast, if it has one."""
        forecast = self._core.spec.forecast
        if forecast is None:
            return
        self._trained.append((epoch["samples"], self._steps_ended - self._epoch_began))
        counted = self._trained[1:] or self._trained  # the first epoch compiles
        samples, seconds = (sum(column) for column in zip(*counted, strict=True))
        if seconds <= 0:
            return
        bins = Counter[int]()
        for row in self._statistics(self._core.shard_statistics).values():
            bins.update({int(tau): int(count) for tau, count in row.get("staleness", {}).items()})
        measured = {
            "measured_samples_per_s": samples / seconds,
            "measured_staleness": sum(tau * count for tau, count in bins.items()) / (bins.total() or 1),
        }
        self._core.job_log.record("forecast", {**forecast.model_dump(), **measured})

    def _warn(self, what: str) -> None:
        """Warn once that the training diverges, with what helps the job's algorithm."""
        if not self._diverges:
            self._diverges = True
            self._core.job_log.write("warning", f"The training diverges: {what} {advice(self._core.spec)}")

    def count_epoch(self) -> None:
        """Write the statistics at an epoch's end, which clients read as soon as they know of it."""
        core, training = self._core, self._training
        if core.spec.method != "fit":
            return
        counts = core.shard_statistics = core.mailbox.call(training.shards.statistics)
        statistics = self._statistics(counts)
        core.job_log.workers(statistics)
        self._report_refused(statistics)

    def end_epoch(self, callbacks: CallbacksSpec | None, *, stops: bool) -> None:
        """Write the state at an epoch's end, before the next one may begin.

        Args:
            callbacks: Callbacks of a detached job after the epoch.
            stops: Whether they end the training: the state is that after all epochs.
        """
        core, training = self._core, self._training
        if core.spec.method == "fit" and not core.server.embedded:
            epochs = training.coordinator.epochs_ended
            artifact = core.store(partial(training.composer.compose, epochs))
            core.job_log.checkpoint(artifact, core.spec.fit.epochs if stops else epochs, callbacks)

    def end_training(self) -> None:
        """Write the state at the end of training, or the answers of a job that only evaluates."""
        core, training = self._core, self._training
        if core.spec.method == "fit":
            artifact = core.store(partial(training.composer.compose, training.coordinator.epochs_ended))
        else:
            artifact = core.store(partial(core.server.artifacts.put, training.coordinator.merger.metrics))
        counts = core.mailbox.call(training.shards.statistics)
        core.job_log.result(artifact, self._statistics(counts), core.spec.method)
        if training.recovery is not None:
            training.recovery.delete_snapshot()

    def _report_refused(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Write how many pushes the shards refused in an epoch."""
        self._warn_of_refused(statistics)
        refused = {name: int(row.get("dropped") or 0) for name, row in statistics.items()}
        more = {name: count - self._refused.get(name, 0) for name, count in refused.items()}
        if counts := ", ".join(f"{count} of {name}" for name, count in more.items() if count):
            self._core.job_log.write("info", f"Refused gradients in this epoch: {counts}.")
        self._refused = refused

    def _warn_of_refused(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        if refused := [name for name, row in statistics.items() if row.get("dropped")]:
            text = "were refused, as they are NaN or infinite, or would have made weights so."
            self._warn(f"Gradients of {', '.join(refused)} {text}")

    def _statistics(self, shards: Any) -> dict[str, dict[str, Any]]:
        def rows() -> dict[str, dict[str, Any]]:
            measured = self._training.coordinator.measured()
            slots = {name: {**slot.details, **slot.report} for name, slot in self._core.slots.workers.items()}
            return {name: {**slots.get(name, {}), **measured.get(name, {})} for name in {**slots, **measured}}

        return merge_statistics(self._core.mailbox.read(rows), shards)


def advice(spec: JobSpec) -> str:
    """Return what helps a training that diverges with the algorithm of the job."""
    steps = ["lower the learning rate", "clip the gradients (clipnorm=1.0 of the optimizer)"]
    workers, algorithm = spec.cluster.workers, spec.algorithm
    if algorithm.consistency_facts.synchronous and workers > 1:
        steps.append(f"let it rise over the first epochs, as a step has the batches of {workers} workers")
    elif workers > 1 and not algorithm.rule_facts.modelled:
        steps.append("compensate the delay of gradients (algorithm='ddc-asgd')")
    return f"Advice: {', or '.join(steps)}."


def has_exploded(loss: float, before: Iterable[float]) -> bool:
    """Whether the mean loss of an epoch exceeds every loss before by so much that the training diverges.

    It exceeds ``GROWTH * max(LEAST, |l|)`` for one of the losses before. Negative losses never do: some, as that of a
    critic, have no lower bound.

    Args:
        loss: Mean of an epoch.
        before: Losses of first batches and of earlier epochs; without any, nothing is known of the loss's scale.
    """
    return any(loss > GROWTH * max(LEAST, abs(each)) for each in before)


def merge_statistics(
    workers: Mapping[str, Mapping[str, Any]], shards: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    """Merge reports and counts into one entry per worker, in the order of ``workers``.

    Args:
        workers: Details (host, pid, device) and report of each worker.
        shards: Counts of each shard, with ``workers``: {name: {pushes, duplicates, dropped, staleness}}.

    Returns:
        Entries of the workers; one that has reported nothing has zeros. ``duplicates`` is the sum over shards,
        ``dropped`` the maximum over shards, and ``staleness`` that of the shards if the worker reported none (it died
        before its first report).
    """
    merged: dict[str, dict[str, Any]] = {}
    for name, row in workers.items():
        counts = [shard.get("workers", {}).get(name, {}) for shard in shards]
        total = {**step_totals(0, 0, 0.0, 0.0), **row, "duplicates": sum(int(c.get("duplicates", 0)) for c in counts)}
        for private in (RECENT, RING):
            total.pop(private, None)
        if dropped := [int(c["dropped"]) for c in counts if "dropped" in c]:
            total["dropped"] = max(dropped)  # a worker cannot distinguish dropped and repeated pushes
        if "staleness" not in total and counts:
            total["staleness"] = dict(counts[0].get("staleness", {}))
        merged[name] = total
    return merged
