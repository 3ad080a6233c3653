"""Gradients of many workers, each with separate weights: one by one, or together in one compiled call.

On TensorFlow it measures gradients alone. With KERAS_BACKEND=jax it measures simulated trainings, on JAX's device.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from benchmarks.reports.report import Report, arguments

if TYPE_CHECKING:
    from benchmarks.workloads.gradient_ways import Ways

RUNS = 5


def run(report: Report, cases: Mapping[str, Ways], workers: int) -> None:
    """Measure every method :data:`RUNS` times in turn; the best run counts."""
    for case, ways in cases.items():
        computes = ways.all()
        for compute in computes.values():
            compute()  # traces
        best = dict.fromkeys(computes, float("inf"))
        for _ in range(RUNS):
            for name, compute in computes.items():
                began = time.perf_counter()
                compute()
                best[name] = min(best[name], time.perf_counter() - began)
        for name, seconds in best.items():
            report.add(case, name, "ms per gradient", 1000 * seconds / workers)


def on_tensorflow(options: argparse.Namespace) -> Report:
    """Measure gradients alone, by every available method."""
    import tensorflow as tf

    from benchmarks.run import simulate
    from benchmarks.workloads.gradient_ways import SAMPLES, WORKERS, Ways
    from benchmarks.workloads.images import read_cifar10, read_images
    from benchmarks.workloads.tasks.cifar10 import CIFAR10
    from benchmarks.workloads.tasks.fashion_mnist import FASHION_MNIST

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    images = read_images(options.data_dir).take(SAMPLES)
    cases = {
        "MLP, 25 k, batch 64": Ways(lambda: simulate.build(1, 0.01, 100), images, 64),
        "MLP, 52 k, batch 128": Ways(lambda: FASHION_MNIST.build(1, keras.optimizers.SGD(0.01)), images, 128),
    }
    if not options.quick:
        colours = read_cifar10(options.data_dir).take(SAMPLES)
        cases["CNN, 57 k, batch 128"] = Ways(lambda: CIFAR10.build(1, keras.optimizers.SGD(0.01)), colours, 128)
    report = Report("batched", [1], notes=[f"{options.threads} threads"])
    run(report, cases, WORKERS)
    return report


def on_jax(options: argparse.Namespace) -> Report:
    """Measure simulated trainings of ResNet-20, or of a tiny model."""
    from benchmarks.workloads import together

    plan = together.QUICK if options.quick else together.Plan(updates=options.updates, workers=options.workers)
    report = Report("batched", [together.SEED], also=together.versions(), notes=[together.device()])
    together.run(report, plan)
    return report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow")
    parser.add_argument("--updates", type=int, default=1173, help="on JAX: updates of ResNet-20")
    parser.add_argument("--workers", type=int, default=32, help="on JAX: simulated workers")
    options = parser.parse_args()
    report = on_jax(options) if keras.backend.backend() == "jax" else on_tensorflow(options)
    report.finish(options.json)


if __name__ == "__main__":
    main()
