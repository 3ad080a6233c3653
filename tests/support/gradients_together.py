"""Program on JAX that simulates jobs with gradients one by one and several in one call, and prints both as JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest import mock

import jax
import keras
from click.testing import CliRunner
from keras import layers

import nfdt.cli.simulated
from nfdt.cli import cli
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.backends.contract import current
from nfdt.model.training import steps
from nfdt.shard import building
from nfdt.simulate.job import SimulatedJob
from nfdt.simulate.trainer import Trainer
from tests.support.round_engine import RoundEngine
from tests.support.simulated_jobs import X, Y, cluster, simulate

LANES = 4  # of the five workers
UNEQUAL = ({"count": 3, "jitter": 0.1}, {"count": 2, "step_ms": 50, "jitter": 0.2})
FIT = {"epochs": 2, "batch_size": 8}


def network(*inside, loss="mse"):
    """Return a regression model; a Dropout in it draws the same units in every run."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(6), *(make() for make in inside), layers.Dense(1)])
    metrics = ["mae", keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]
    model.compile(keras.optimizers.SGD(0.01 if loss == "mse" else 0.0005, momentum=0.9), loss, metrics=metrics)
    return model


NORMALISED = (layers.BatchNormalization, lambda: layers.Dropout(0.2))


def stream(rows=8):
    """Return an endless iterator over batches of the data."""

    def batches():
        while True:
            for start in range(0, len(X), rows):
                yield X[start : start + rows], Y[start : start + rows]

    return batches()


class Calls:
    """The batched step of a trainer, and the widths of its calls."""

    def __init__(self, step):
        self._step, self.widths, self.signatures = step, [], set()

    def __getattr__(self, name):
        return getattr(self._step, name)

    def __call__(self, lanes):
        self.widths.append(len({id(lane) for lane in lanes}))
        self.signatures.add(str(lanes[0].batches[0].signature))
        return self._step(lanes)


def run(described, algorithm, lanes, *, preset=None, inside=(), loss="mse", **options):
    """Simulate a job; ``preset``: a preset that scripts on JAX may not choose, in place of ``algorithm``."""
    calls = []

    def make(spec, manifest, read, of_cluster):
        if preset is not None:
            spec = spec.model_copy(update={"algorithm": resolve_algorithm(preset)})
        trainer = Trainer(spec, manifest, read, lanes=lanes)
        if trainer._pending is not None:
            calls.append(Calls(trainer._pending._step))
            trainer._pending._step = calls[0]
        return SimulatedJob(spec, manifest, read, of_cluster, trainer)

    with mock.patch.object(nfdt.cli.simulated, "SimulatedJob", make):
        job, _, history = simulate(described, algorithm, model=network(*inside, loss=loss), **{**FIT, **options})
    return report(job, history, calls[0] if calls else None)


def report(job, history, calls):
    record, state = job.record, job.snapshot()
    return {
        "schedule": [
            [[p.at_s, p.samples, p.epoch, p.ends_epoch] for p in record.points],
            [[event.at, event.kind] for event in job.events()],
            record.answered,
            sorted(record.staleness.items()),
            {number: [use.samples, use.steps, use.busy_s] for number, use in record.machines.items()},
            job.shards.stores[0].order,
        ],
        "weights": state.weights.tolist(),
        "untrained": [array.astype("f8").ravel().tolist() for array in state.untrained.values()],
        "logs": [dict(p.logs) for p in record.points],
        "history": history.history,
        "gradients": job.trainer.gradients,
        "widths": calls.widths if calls else [],
        "signatures": len(calls.signatures) if calls else 0,
    }


def both(*described, algorithm="ddc-asgd", **options):
    return [run(cluster(*described), algorithm, lanes, **options) for lanes in (1, LANES)]


def on_gpu():
    """Return the patch by which JAX states that it has a GPU."""
    return mock.patch.object(jax, "default_backend", return_value="gpu")


def automatic(described, **options):
    """Return the reports of one by one on a CPU, and of what is chosen on a GPU."""
    one_by_one = run(described, "ddc-asgd", None, **options)
    with on_gpu():
        return [one_by_one, run(described, "ddc-asgd", None, **options)]


def scenarios():
    slow = cluster(*({**workers, "bandwidth_mbit": 0.1, "latency_ms": 20} for workers in UNEQUAL))
    found = {
        "ddc-asgd": both(*UNEQUAL, inside=NORMALISED, batch_size=10),  # the last batch has 6 rows
        "overlap, as on a GPU": automatic(slow, overlap=1),
        "dbs": both({"count": 2}, {"step_ms": 400}, algorithm="dbs-sgd", update_rule="ddc", epochs=4, batch_size=10),
        "failing": both({}, {}, {"fails_at_s": 0.25, "returns_after_s": 0.2}, inside=NORMALISED),
        "stream": both(*UNEQUAL, x=stream(), y=None, batch_size=None, steps_per_epoch=12, epochs=1),
        "groups": both(*UNEQUAL, inside=NORMALISED[:1], preset="group-sync", epochs=1),
    }
    with mock.patch.object(building, "_keras_engine", RoundEngine.of_program):
        found["bsp"] = both(*UNEQUAL, algorithm="bsp", update_rule="ddc", epochs=1)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        found["sums"] = both(*UNEQUAL, algorithm="bsp", update_rule="ddc", epochs=1, loss=loss)
    return found


# ---- models whose gradients are computed one by one


class OwnStep(keras.Sequential):
    def train_step(self, state, data):
        return super().train_step(state, data)


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight)


class Merged(keras.metrics.MeanAbsoluteError):
    def merge_state(self, metrics):
        raise AssertionError("not called here")


class LastValue(keras.metrics.Metric):
    def __init__(self, name="last"):
        super().__init__(name=name)
        self.last = self.add_variable((), "zeros", aggregation="mean", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.last.assign(keras.ops.mean(y_pred))

    def result(self):
        return self.last


def fits(kind=keras.Sequential, optimizer=None, *, metrics=("mae",), trainable=True, **options):
    """Return whether the gradients of a model can be computed together."""
    model = kind([keras.Input((5,)), layers.Dense(1, trainable=trainable)])
    model.compile(optimizer or keras.optimizers.SGD(), "mse", metrics=list(metrics), **options)
    model.compute_metrics(X[:2], Y[:2], Y[:2], None)  # creates the variables of the metrics
    layout = ParameterLayout.of([(v.path, tuple(v.shape)) for v in model.trainable_variables])
    return steps.batched_step(steps.gradient_step(model, layout)) is not None


def refusals():
    adaptive = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return {
        "plain": fits(),
        "fixed loss scale": fits(optimizer=keras.optimizers.SGD(loss_scale_factor=8.0)),
        "own train_step": fits(OwnStep),
        "own compute_metrics": fits(OwnMetrics),
        "changing loss scale": fits(optimizer=adaptive),
        "eager": fits(run_eagerly=True),
        "not compiled": fits(jit_compile=False),
        "metric that merges itself": fits(metrics=[Merged()]),
        "metric of means": fits(metrics=[LastValue()]),
        "nothing trainable": fits(trainable=False),
    }


SCRIPT = """
import keras
import numpy as np

x = np.arange(64, dtype="float32").reshape(16, 4) / 64
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
model.fit(x, x[:, :1], batch_size=4, verbose=0)
"""


def command(algorithm):
    """Return exit code and output of ``nfdt simulate`` with a script."""
    with tempfile.TemporaryDirectory() as folder:
        script, described = Path(folder) / "train.py", Path(folder) / "cluster.toml"
        script.write_text(SCRIPT)
        described.write_text("[[workers]]\ncount = 2\nstep_ms = 10\n")
        arguments = ["simulate", "--cluster", str(described), "--algorithm", algorithm, str(script)]
        done = CliRunner().invoke(cli, arguments)
    return [done.exit_code, done.output]


def main():
    with on_gpu():
        lanes_on_gpu = current().lanes
    found = {
        "backend": keras.backend.backend(),
        "lanes": [current().lanes, lanes_on_gpu],
        "refusals": refusals(),
        "commands": {algorithm: command(algorithm) for algorithm in ("ddc-asgd", "asgd")},
        "jobs": scenarios(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
