"""Score after equal samples on simulated clusters, with real gradients: many trainings, one line of results each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks.reports.report import versions
from benchmarks.reports.study_results import ResultFile, Setting, Training
from benchmarks.workloads.clusters import expected_seconds, machines
from benchmarks.workloads.convergence_rows import ROWS, batches_per_update
from benchmarks.workloads.device import device_name
from benchmarks.workloads.reference_rules import reference_rules
from benchmarks.workloads.study_plan import RESULTS, Plan, options_of, plan_of, setting_of, trainings
from benchmarks.workloads.tasks import TASKS
from benchmarks.workloads.tasks.task import TaskData
from benchmarks.workloads.virtual import Trained, VirtualTraining
from nfdt.core.errors import NfdtError
from nfdt.simulate.results import described_limits


def make_optimizer(setting: Setting, rate: float, updates: int) -> keras.optimizers.Optimizer:
    """Return the optimizer of a setting; warm-up over a fifth of the updates, then a cosine to zero."""
    warmup = max(1, updates // 5)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, updates - warmup), warmup_target=rate, warmup_steps=warmup
    )
    if setting.optimizer == "sgd":
        decay = setting.weight_decay or None
        return keras.optimizers.SGD(schedule, momentum=setting.momentum, weight_decay=decay)
    return keras.optimizers.AdamW(schedule, weight_decay=setting.weight_decay)


class Study:
    """The trainings of one plan.

    Args:
        plan: The plan.
        results: File of the results; trainings in it are not repeated.
        data: Samples of the task.
    """

    def __init__(self, plan: Plan, results: ResultFile, data: TaskData) -> None:
        self._plan, self._results, self._task = plan, results, TASKS[plan.task]
        self._data = data.split(plan.split).take(plan.samples)
        self.setting = setting_of(plan, self._data.name, len(self._data.train[0]))
        self._training = VirtualTraining(
            self._build, self._data.train, self._data.test, self.setting.batch, self.setting.epochs
        )

    def run(self) -> None:
        """Train whatever the file of the results lacks."""
        with reference_rules():
            for training in trainings(self._plan, self.setting):
                if training not in self._results:
                    line = {**training.to_json(), **self._result(training), **self._environment()}
                    self._results.append(line)
                    print(_described(line), flush=True)

    def _build(self, seed: int, rate: float, updates: int) -> keras.Model:
        return self._task.build(seed, make_optimizer(self.setting, rate, updates))

    def _result(self, training: Training) -> dict[str, Any]:
        """Train, and return the result, or what failed."""
        row, workers = ROWS[training.row], training.workers
        cluster = machines(workers, training.speeds, expected_seconds(self.setting.updates, workers))
        try:
            trained = self._training.run(
                row.preset,
                cluster,
                seed=training.seed,
                rate=row.rate(training.rate, workers),
                merged=batches_per_update(row.algorithm, workers),
                overrides=row.options,
            )
        except NfdtError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return self._figures(trained, described_limits(cluster, self.setting.batch)["samples_per_s"])

    def _figures(self, trained: Trained, limit: float) -> dict[str, Any]:
        record, targets = trained.record, self._data.test[1]
        curve = [[round(p.at_s, 3), round(self._task.score(p.logs, targets), 6)] for p in trained.epochs]
        last = trained.epochs[-1].logs
        loss = float(last["val_loss"])
        return {
            "metric": self._task.metric,
            "score": curve[-1][1],
            "loss": round(loss, 6) if np.isfinite(loss) else None,
            **{name: round(value, 6) for name, value in self._task.more(last, targets).items()},
            "curve": curve,
            "virtual_s": round(record.seconds, 3),
            "of_limit": round(record.samples / record.seconds / limit, 4),
            "mean_staleness": round(record.mean_staleness, 3),
            "max_staleness": record.most_staleness,
            "staleness": {str(tau): count for tau, count in sorted(record.staleness.items())},
            "worker_staleness": [round(_mean_staleness(w["staleness"]), 3) for w in trained.workers.values()],
            "dropped": record.dropped,
            "wall_s": round(trained.wall_s, 1),
            "gradient_s": round(trained.gradient_s, 1),
        }

    @staticmethod
    def _environment() -> dict[str, Any]:
        return {"backend": keras.backend.backend(), "device": device_name(), "versions": versions()}


def _mean_staleness(counts: Mapping[str, int]) -> float:
    """Return the mean number of updates that the gradients of one worker missed."""
    return sum(int(tau) * count for tau, count in counts.items()) / max(1, sum(counts.values()))


def _described(line: dict[str, Any]) -> str:
    case = " ".join(str(line[name]) for name in ("task", "row", "workers", "speeds", "rate", "seed"))
    return f"{case}: {line.get('error') or '{metric} {score:.4f}'.format(**line)}"


def main() -> None:
    options = options_of(sys.argv[1:])
    plan = plan_of(options)
    path = options.results or (None if options.quick else RESULTS)
    Study(plan, ResultFile(path), TASKS[plan.task].read(options.data_dir)).run()


if __name__ == "__main__":
    main()
