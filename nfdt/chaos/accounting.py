"""What a trial trained: by the recorded events of its jobs, and by a model whose weights count its samples."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nfdt.chaos.schedule import PlannedFault
from nfdt.core.errors import NfdtError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import ClusterSpec, find_idle, resolve_algorithm

BUSY_S = 1.0
STEP_S = 0.5  # precision of the time until full speed


@dataclass(frozen=True)
class RecordedEvent:
    """One event of a job; ``at`` is Unix time in seconds."""

    at: float
    kind: str
    data: dict[str, Any]


@dataclass
class RecordedJob:
    """The part of a job that has been read.

    Attributes:
        job_id: The job.
        samples: Number of samples of one epoch; None where the specification does not determine it.
        events: Its events so far.
        state: Its last state.
        cursor: Number of the last event.
    """

    job_id: str
    samples: int | None
    events: list[RecordedEvent] = field(default_factory=list)
    state: str = "queued"
    cursor: int = 0


class RecordedJobs:
    """Reader of the jobs of one state directory.

    It reads the server's database: a connection to the server would count as a client that watches the job.

    Args:
        state_dir: The directory; the server may not have made it yet.

    Attributes:
        jobs: All jobs so far, oldest first.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "jobs.sqlite"
        self.jobs: list[RecordedJob] = []

    def read(self) -> bool:
        """Add new jobs and events; return whether there were new events, False if the file cannot be read now."""
        if not self._path.exists():
            return False
        with contextlib.suppress(sqlite3.Error):
            with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", BUSY_S, uri=True)) as database:
                return self._read(database)
        return False

    def _read(self, database: sqlite3.Connection) -> bool:
        known = {job.job_id for job in self.jobs}
        for job_id, spec in database.execute("SELECT job_id, spec_json FROM jobs ORDER BY submitted_at"):
            if job_id not in known:
                self.jobs.append(RecordedJob(job_id, samples_of_epoch(json.loads(spec))))
        news = False
        for job in self.jobs:
            rows = "SELECT cursor, at, kind, data_json FROM events WHERE job_id = ? AND cursor > ? ORDER BY cursor"
            for cursor, at, kind, data in database.execute(rows, (job.job_id, job.cursor)):
                event = RecordedEvent(at, kind, json.loads(data))
                job.cursor = cursor
                job.events.append(event)
                job.state = str(event.data["state"]) if kind == "state" else job.state
                news = True
        return news


def samples_of_epoch(spec: dict[str, Any]) -> int | None:
    """Return the samples of an epoch of a job's specification; None where it does not determine them."""
    sized = spec["train"]["kind"] == "arrays" and spec["fit"].get("steps_per_epoch") is None
    return spec["train"]["samples"] if sized else None


def events_of(jobs: Sequence[RecordedJob], *kinds: str) -> Iterator[tuple[RecordedJob, RecordedEvent]]:
    """Yield the events of these kinds, each with its job, in order."""
    for job in jobs:
        for event in job.events:
            if event.kind in kinds:
                yield job, event


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
    """Yield the time of each event that shows progress, and the position at that time; positions may go back."""
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
    return next((event.at for _, event in events_of(jobs, "progress")), None)


def trained_steps(jobs: Sequence[RecordedJob]) -> int:
    """Return the steps of all jobs so far; steps that were repeated count once."""
    steps: dict[tuple[str, int], int] = {}
    for job, event in events_of(jobs, "progress", "epoch_end"):
        key = (job.job_id, event.data["epoch"])
        steps[key] = max(steps.get(key, 0), event.data["steps"])
    return sum(steps.values())


def recovered_at(jobs: Sequence[RecordedJob], at: float) -> float | None:
    """Return when, after ``at``, training first passed the farthest position reached before; None: never."""
    farthest = TrainingPosition()
    for when, position in positions(jobs):
        if when <= at:
            farthest = max(farthest, position)
        elif position > farthest:
            return when
    return None


def training_times(jobs: Sequence[RecordedJob]) -> list[tuple[float, int]]:
    """Return the times at which samples were trained, ascending, and how many since the time before.

    Samples that are trained again count, too.
    """
    found, last = [], TrainingPosition(0)
    sizes = [job.samples or 0 for job in jobs]
    for at, position in positions(jobs):
        epochs = position.epoch - last.epoch if position.job == last.job else 0
        more = position.samples - last.samples + epochs * sizes[min(position.job, len(sizes) - 1)]
        if position.job == last.job and more > 0:
            found.append((at, more))
        last = position
    return found


def longest_pause(times: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Return the longest time within ``[begin, end]`` in which no sample was trained; see :func:`training_times`."""
    inside = [begin, *(at for at, _ in times if begin < at < end), end]
    return max(after - before for before, after in itertools.pairwise(inside))


def full_speed_after(times: Sequence[tuple[float, int]], at: float, end: float, window_s: float = 3.0) -> float | None:
    """Return the seconds from a fault until as many samples per second as before it are trained again.

    Nine tenths count as as many, over ``window_s`` each; None: it did not happen until ``end``.
    """

    def rate(begin: float) -> float:
        return sum(samples for when, samples in times if begin < when <= begin + window_s)

    before = rate(at - window_s)
    slow = [begin for begin in _steps(at, end - window_s) if rate(begin) < 0.9 * before]
    if not slow:
        return 0.0
    return None if slow[-1] + STEP_S >= end - window_s else slow[-1] + STEP_S - at


def _steps(begin: float, end: float) -> list[float]:
    return [begin + STEP_S * step for step in range(max(0, int((end - begin) / STEP_S)))]


def count_samples(jobs: Sequence[RecordedJob]) -> SampleCounts:
    """Count the samples of all jobs; epochs that a failed job did not reach are not counted."""
    once = again = never = 0
    for job in jobs:
        ends = {event.data["epoch"]: event.data["samples"] for _, event in events_of([job], "epoch_end")}
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
    ends = [event.data for _, event in events_of(jobs, "epoch_end")]
    if not ends:
        return {}
    end = ends[-1]
    validation = {f"val_{name}": value for name, value in (end.get("val_logs") or {}).items()}
    return {name: value for name, value in {**end["logs"], **validation}.items() if isinstance(value, int | float)}


def failure(jobs: Sequence[RecordedJob]) -> str | None:
    """Return why a job failed or was cancelled; None if all of them succeeded or run."""
    for job, event in events_of(jobs, "state"):
        if event.data["state"] in ("failed", "cancelled"):
            error = event.data.get("error") or {}
            return f"{job.job_id} {event.data['state']}: {event.data.get('reason') or error.get('message') or '?'}"
    return None


AFTER_S = 4.0  # training goes on that long after the last fault
# Keras alone, for two epochs more than it has to. Sample i looks up row i of an embedding only. Its gradient exceeds
# the clipping value, whatever the update divides it by: each update moves the row by exactly -1, towards the target,
# with the options of counting_options.
SCRIPT = """
import json
import time

import keras
import numpy as np

RESULT, STEPS, SECONDS = {result!r}, {steps!r}, {seconds!r}
SAMPLES, BATCH, TARGET = 1536, 8, -1e4


class Enough(keras.callbacks.Callback):
    began_at = None

    def on_epoch_begin(self, epoch, logs=None):
        self.began_at = self.began_at or time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if (epoch - 1) * self.params["steps"] >= STEPS and time.monotonic() - self.began_at >= SECONDS:
            self.model.stop_training = True


embedding = keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros")
model = keras.Sequential([keras.Input((1,), dtype="int32"), embedding, keras.layers.Flatten()])
model.compile(keras.optimizers.SGD(1.0, clipvalue=1.0), "mean_squared_error")
numbers, targets = np.arange(SAMPLES, dtype="int32")[:, None], np.full((SAMPLES, 1), TARGET, "float32")
history = model.fit(numbers, targets, batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[Enough()])
found = zip(*np.unique(-model.get_weights()[0].ravel(), return_counts=True), strict=True)
times = {{str(float(count)): int(samples) for count, samples in found}}
with open(RESULT, "w") as file:
    json.dump({{"epochs": history.epoch[-1] + 1, "times": times}}, file)
"""


def counting_script(result: Path, *, steps: int = 0, seconds: float = 0.0) -> str:
    """Return a script that trains the model for at least so many steps and seconds.

    It writes a JSON file: ``{"epochs": number of epochs, "times": {times trained: number of samples}}``.
    """
    return SCRIPT.format(result=str(result), steps=steps, seconds=seconds)


def length_for(faults: Sequence[PlannedFault]) -> dict[str, Any]:
    """Return the arguments of :func:`counting_script` for a training that goes on until the faults are over."""
    ends_s = [fault.at_s + (fault.row.seconds or 0.0) + AFTER_S for fault in faults if fault.at_s is not None]
    steps = [fault.at_step for fault in faults if fault.at_step is not None]
    return {"steps": max(steps, default=0), "seconds": max(ends_s, default=0.0)}


def read_counts(result: Path) -> SampleCounts:
    """Return the samples that the script has counted, over all epochs.

    Raises:
        NfdtError: The file is missing, or a sample was moved by a part of an update.
    """
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NfdtError(f"The counting model has left no counts: {error}") from None
    epochs, times = int(found["epochs"]), {float(count): int(samples) for count, samples in found["times"].items()}
    if broken := [count for count in times if count != int(count)]:
        raise NfdtError(f"Counting model: expected updates that move a sample by 1. Received: {broken[0]:g} in all.")
    once = sum(min(count, epochs) * samples for count, samples in times.items())
    again = sum(max(0.0, count - epochs) * samples for count, samples in times.items())
    never = sum(max(0.0, epochs - count) * samples for count, samples in times.items())
    return SampleCounts(int(once), int(again), int(never))


def counting_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``nfdt run`` with which the model counts: without what compensates delayed gradients.

    A gradient on weights of before a row's last update moves this row by less, or not at all.
    """
    off = {"dc_lambda": 0.0, "gap": 0.0}
    idle = find_idle(_algorithm_of(options), ClusterSpec(), off)
    return {**options, **{name: value for name, value in off.items() if name not in idle}}


def _algorithm_of(options: Mapping[str, Any]) -> AlgorithmSpec:
    parts = {name: value for name, value in options.items() if name in AlgorithmSpec.model_fields and name != "name"}
    return resolve_algorithm(options.get("algorithm"), **parts)


def why_not_counted(options: Mapping[str, Any]) -> str:
    """Return why the weights of a job with these options of ``nfdt run`` do not count its samples; "" if they do."""
    algorithm = _algorithm_of(options)
    if not algorithm.topology_facts.flat or algorithm.plan == "topology":
        return "groups and allreduce rings promise no exact count"
    if algorithm.consistency_facts.merges:
        return f"consistency={algorithm.consistency!r} averages gradients of several batches"
    if algorithm.codec_facts.encodes or algorithm.encodes_replies:
        return f"codec={algorithm.codec!r} sends approximations"
    if algorithm.batch_facts.follows_speed:
        return f"batch={algorithm.batch!r} scales the learning rate of each batch"
    return ""
