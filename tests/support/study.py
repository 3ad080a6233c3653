"""Samples of every task of the convergence study, made up, and results that no training made."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.reports.study_results import Result, Setting, Training
from benchmarks.workloads.tasks import characters, housing, sms
from benchmarks.workloads.tasks.task import TaskData

SIDES = {"fashion-mnist": (28, 28, 1), "cifar10": (32, 32, 3), "cifar10-resnet20": (32, 32, 3)}
SIDES |= {"mnist": (28, 28, 1), "cifar10-resnet8": (16, 16, 3), "cifar10-cnn16": (16, 16, 3)}


def made_up(task: str, samples: int) -> TaskData:
    """Return data of a task with this number of training samples, or a few more."""
    random = np.random.default_rng(0)
    if task == "sms":
        texts = [f"call {i} now!" if i % 4 == 0 else f"see you at {i}" for i in range(2 * samples)]
        return sms.prepare(texts, [i % 4 == 0 for i in range(2 * samples)])
    if task == "characters":
        return characters.prepare(["call me at seven, or later " * 4] * samples)
    if task == "housing":
        x = random.normal(5.0, 2.0, (2 * samples, 8)).astype(np.float32)
        return housing.prepare(x, 1000 * x.sum(1))
    images = random.random((samples, *SIDES[task])).astype(np.float32)
    labels = (np.arange(samples) % 10).astype(np.int32)
    return TaskData(task, (images, labels), (images, labels))


SETTING = Setting("fashion-mnist", 3, 60_000, 128, "sgd", 0.9, 0.0)


def result(row: str, workers: int, rate: float, score: float, *, speeds: str = "equal", seed: int = 0, **changes):
    """Return a result; ``changes`` are those of the setting."""
    setting = Setting(**{**vars(SETTING), **changes})
    training = Training(setting, row, workers, speeds, rate, seed)
    curve = [(60.0 / workers, score - 0.1), (120.0 / workers, score)]
    return Result(training, score, curve, 120.0 / workers, 0.9, workers - 1.0)


def some_results() -> list[Result]:
    """Return results of two rates, clusters and seeds, in which ``asgd`` diverges at one machine's rate."""
    alone = [(rate, 0.92 if rate == 0.05 else 0.90) for rate in (0.05, 0.01)]
    found = [result("sequential", 1, rate, score, seed=seed) for rate, score in alone for seed in (0, 1)]
    for workers, rate, seed in itertools.product((4, 8), (0.05, 0.01), (0, 1)):
        score = 0.88 - workers / 1000 - 0.01 * (rate == 0.01) + 0.002 * seed
        found.append(result("ddc-asgd", workers, rate, score, seed=seed))
        found.append(result("asgd", workers, rate, 0.1 if rate == 0.05 else 0.8, seed=seed))
    return found
