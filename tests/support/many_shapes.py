"""Program on JAX that computes gradients of many batch sizes in a process with few memory maps left."""

from __future__ import annotations

import mmap
from pathlib import Path

import keras
import numpy as np

from nfdt.model.program.pack import pack
from nfdt.model.training import steps

LEFT, SIZES = 120, 12  # memory maps, and batch sizes; each compiled size takes tens of maps


def main() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    layout = pack(model, (np.ones((1, 4), np.float32), np.ones((1, 1), np.float32))).manifest.layout
    step = steps.gradient_step(model, layout)
    weights = np.ones(layout.size, np.float32)
    held = _held(LEFT)
    for size in range(1, SIZES + 1):
        batch = (np.ones((size, 4), np.float32), np.ones((size, 1), np.float32))
        norm = float(np.linalg.norm(step(weights, batch).vector))
    print(f"{step.traces} sizes, {len(held)} held, norm {norm:.4f}")


def _held(left: int) -> list[mmap.mmap]:
    """Take all memory maps of the process but a few; neighbours of one protection would be one map."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    free = limit - Path("/proc/self/maps").read_bytes().count(b"\n") - left
    return [mmap.mmap(-1, 4096, prot=mmap.PROT_READ | (mmap.PROT_WRITE if i % 2 else 0)) for i in range(free)]


if __name__ == "__main__":
    main()
