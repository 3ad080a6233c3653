"""Progress, recovery and samples of jobs, computed from their recorded events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nfdt.chaos.recorded_events import RecordedJob


@dataclass(frozen=True, order=True)
class TrainingPosition:
    """Progress of training: the number of the job, its epoch, and the samples trained in that epoch."""

    job: int = -1
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class SampleCounts:
    """Samples over all epochs.

    Attributes:
        once: Number that were trained exactly once.
        again: Number of trainings whose result was lost, so that they were repeated, or that count twice.
        never: Number that were not trained.
    """

    once: int = 0
    again: int = 0
    never: int = 0


def positions(jobs: Sequence[RecordedJob]) -> Iterator[tuple[float, TrainingPosition]]:
    """Yield the time of each event that shows progress, and the position then; it may go back."""
    for number, job in enumerate(jobs):
        for event in job.events:
            data = event.data
            if event.kind == "epoch_begin":
                yield event.at, TrainingPosition(number, data["epoch"])
            elif event.kind == "progress":
                yield event.at, TrainingPosition(number, data["epoch"], data["samples"])
            elif event.kind == "epoch_end":
                yield event.at, TrainingPosition(number, data["epoch"] + 1)
            elif event.kind == "state" and data["state"] == "succeeded":
                yield event.at, TrainingPosition(number + 1)


def first_progress(jobs: Sequence[RecordedJob]) -> float | None:
    """Return the time of the first trained step; None before it."""
    return next((e.at for job in jobs for e in job.events if e.kind == "progress"), None)


def trained_steps(jobs: Sequence[RecordedJob]) -> int:
    """Return the steps of all jobs so far; steps that were repeated count once."""
    steps: dict[tuple[str, int], int] = {}
    for job in jobs:
        for event in job.events:
            if event.kind in ("progress", "epoch_end"):
                key = (job.job_id, event.data["epoch"])
                steps[key] = max(steps.get(key, 0), event.data["steps"])
    return sum(steps.values())


def recovered_at(jobs: Sequence[RecordedJob], at: float) -> float | None:
    """Return the time after ``at`` when training was beyond the farthest position of before; None: never."""
    farthest = TrainingPosition()
    for when, position in positions(jobs):
        if when <= at:
            farthest = max(farthest, position)
        elif position > farthest:
            return when
    return None


def count_samples(jobs: Sequence[RecordedJob]) -> SampleCounts:
    """Count the samples of all jobs; a job that has not succeeded misses those of its last epochs."""
    once = again = never = 0
    for job in jobs:
        ends = {event.data["epoch"]: event.data["samples"] for event in job.events if event.kind == "epoch_end"}
        size = job.samples or max(ends.values(), default=0)
        for epoch in range(min(ends, default=0), max(ends, default=-1) + 1):
            trained = ends.get(epoch, 0)
            once += min(trained, size)
            again += max(0, trained - size)
            never += max(0, size - trained)
        again += _repeated(job, size)
    return SampleCounts(max(0, once - again), again, never)


def _repeated(job: RecordedJob, size: int) -> int:
    """Return how many samples a job has trained again because its position went back."""
    repeated, last = 0, TrainingPosition()
    for event in job.events:
        if event.kind == "shards_restored":
            redone = event.data["redone_samples"]
            repeated, last = repeated + redone, replace(last, samples=max(0, last.samples - redone))
        if event.kind == "epoch_begin" and event.data["epoch"] == last.epoch:
            continue  # an epoch that goes on in its middle: its next progress shows where
        for _, position in positions([replace(job, events=[event])]):
            if position < last:
                repeated += (last.epoch - position.epoch) * size + last.samples - position.samples
            last = position
    return repeated


def last_logs(jobs: Sequence[RecordedJob]) -> dict[str, float]:
    """Return the logs of the last epoch of the last job, validation included."""
    ends = [event.data for job in jobs for event in job.events if event.kind == "epoch_end"]
    return _logs(ends[-1]) if ends else {}


def _logs(end: Mapping[str, Any]) -> dict[str, float]:
    validation = {f"val_{name}": value for name, value in (end.get("val_logs") or {}).items()}
    return {name: value for name, value in {**end["logs"], **validation}.items() if isinstance(value, int | float)}


def failure(jobs: Sequence[RecordedJob]) -> str | None:
    """Return why a job failed or was cancelled; None if all of them succeeded or run."""
    for job in jobs:
        for event in job.events:
            if event.kind == "state" and event.data["state"] in ("failed", "cancelled"):
                error = event.data.get("error") or {}
                return f"{job.job_id} {event.data['state']}: {event.data.get('reason') or error.get('message') or '?'}"
    return None
