"""Simulated trainings on JAX whose gradients are computed one by one, or several in one call."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import jax
import keras
import numpy as np

from benchmarks.reports.report import Report
from benchmarks.workloads.tasks.resnet import resnet
from benchmarks.workloads.virtual import Trained, VirtualTraining
from nfdt.model.backends.jax import LANES
from nfdt.simulate.cluster import parse_cluster
from nfdt.simulate.record import Record

SEED, RATE = 1, 0.05
ALGORITHM = "ddc-asgd"
EPOCH = 391
"""Most batches of an epoch, those of CIFAR-10 with 128 samples."""


@dataclass(frozen=True)
class Plan:
    """Trainings of one run, on random images.

    Attributes:
        updates: Gradients of each training.
        workers: Simulated workers, equal but for random step times.
        batch: Samples of a gradient.
        widths: Channels of each stage; the second and later ones begin with a stride.
        blocks: Residual blocks of each stage.
        size: Height and width of an image.
    """

    updates: int = 1173
    workers: int = 32
    batch: int = 128
    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 3
    size: int = 32

    @property
    def case(self) -> str:
        """Name of the model with the numbers."""
        depth = 2 * self.blocks * len(self.widths) + 2
        return f"ResNet-{depth}, batch {self.batch}, {self.workers} workers, {self.updates} updates"


QUICK = Plan(updates=12, workers=3, batch=4, widths=(4,), blocks=1, size=4)


def build(plan: Plan, seed: int, rate: float) -> keras.Model:
    """Build a residual network with BatchNorm."""
    keras.utils.set_random_seed(seed)
    model = resnet((plan.size, plan.size, 3), widths=plan.widths, blocks=plan.blocks)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run(report: Report, plan: Plan) -> None:
    """Train by both ways, each twice: the first time with compilation."""
    cluster = parse_cluster({"workers": [{"count": plan.workers, "step_ms": 100, "jitter": 0.2}]})
    records: list[Record] = []
    for way, lanes in {"one by one": 1, "together": LANES}.items():
        training = _training(plan, lanes)
        for run_number in range(2):
            trained = training.run(ALGORITHM, cluster, seed=SEED, rate=RATE)
            _add(report, plan.case, way + ("" if run_number else ", compiling"), trained)
        records.append(trained.record)
    seconds = [report.runs(plan.case, way, "s")[0] for way in ("together", "one by one")]
    report.ratios["together/one by one"] = seconds[0] / seconds[1]
    report.ratios["same schedule"] = _schedule(records[0]) == _schedule(records[1])


def device() -> str:
    """Return the device that JAX computes on."""
    return f"JAX on {jax.default_backend()}: {jax.devices()[0].device_kind}"


def versions() -> list[str]:
    """Return the versions of JAX, as ``name==version``."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]


def _training(plan: Plan, lanes: int) -> VirtualTraining:
    epochs = -(-plan.updates // EPOCH)
    samples, random = plan.batch * -(-plan.updates // epochs), np.random.default_rng(SEED)
    images = random.random((samples, plan.size, plan.size, 3), np.float32)
    labels = random.integers(0, 10, samples).astype(np.int32)
    test = images[: plan.batch], labels[: plan.batch]
    return VirtualTraining(
        lambda seed, rate, _: build(plan, seed, rate), (images, labels), test, plan.batch, epochs, lanes
    )


def _add(report: Report, case: str, peer: str, trained: Trained) -> None:
    report.add(case, peer, "s", trained.wall_s)
    report.add(case, peer, "s of gradients", trained.gradient_s)
    report.add(case, peer, "s of the shard", trained.shard_s)
    report.add(case, peer, "updates", len(trained.record.answered))


def _schedule(record: Record) -> tuple[object, ...]:
    return record.answered, sorted(record.staleness.items()), [point.at_s for point in record.points]
