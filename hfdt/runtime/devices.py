"""Division of a machine's cores and GPUs between its ranks."""

from __future__ import annotations

import os

import tensorflow as tf

from hfdt.runtime.communicator import Communicator


def share_machine(communicator: Communicator, neighbours: int = 0) -> None:
    """Limit this rank to its share of the cores, and to one GPU.

    Args:
        communicator: The ranks, some of them on this machine.
        neighbours: Number of ranks of other groups on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // (communicator.local_size + neighbours))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # Operations of Horovod wait for other ranks: with a single thread nothing else would run meanwhile.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[communicator.local_rank % len(gpus)], "GPU")


def device_name() -> str:
    """Return the device of this rank: ``cpu`` or, as on the worker's machine, ``gpu:0``."""
    gpus = tf.config.get_visible_devices("GPU")
    return gpus[0].name.rpartition("physical_device:")[2].lower() if gpus else "cpu"
