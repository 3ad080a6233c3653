"""Share of the machine's devices that a worker's process takes, and the state of its device's generator."""

from __future__ import annotations

import logging

from nfdt.core.host.keras_backend import TENSORFLOW, current_backend

logger = logging.getLogger(__name__)


def share_gpus() -> None:
    """Leave unused GPU memory to other processes; JAX and PyTorch need no code for it."""
    if current_backend().name != TENSORFLOW:
        return
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def seed_generator(worker: int) -> None:
    """Seed PyTorch's own generator, from which dropout draws: other units per worker, the same ones in every run."""
    if current_backend().name == "torch":
        import torch

        torch.manual_seed(worker)


def limit_threads(threads: int) -> None:
    """Limit TensorFlow or PyTorch to this worker's share of the cores; JAX takes all cores of the process.

    Only the first job of a process can limit TensorFlow.
    """
    if threads and current_backend().name == "torch":
        import torch

        torch.set_num_threads(threads)
    elif threads and current_backend().name == TENSORFLOW:
        import tensorflow as tf

        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError:
            logger.debug("TensorFlow runs already; its thread count stays")
