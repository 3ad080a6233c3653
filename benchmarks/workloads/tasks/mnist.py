"""MNIST with the MLP of Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.workloads.tasks.fashion_mnist import mlp
from benchmarks.workloads.tasks.task import StudyTask, TaskData, read_file


def read(data_dir: Path | None) -> TaskData:
    """Read ``mnist.npz``; images (n, 28, 28, 1) in [0, 1]."""
    with np.load(read_file(data_dir, "mnist.npz")) as arrays:
        parts = [(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
    train, test = (((x[..., None] / 255.0).astype("float32"), y.astype("int32")) for x, y in parts)
    return TaskData("mnist", train, test)


MNIST = StudyTask("mnist", "MNIST, an MLP", read, mlp)
