"""Estimate of the time that the cluster saves in a call of ``evaluate`` or ``predict``, from the last fit's speeds.

::

    saved = batches * BATCH_S + compute * (1 - 1 / devices) - START_S - bytes / LINK_BYTES_S

``compute`` is the time of all forward passes on one device, and ``devices`` is the number of machines and GPUs of the
workers. Workers on one machine share its cores, which Keras alone uses as well: they only save what Keras does besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nfdt_client import training_data

BATCH_S = 0.3e-3  # work of Keras for a batch besides the model's own, in seconds
START_S = 1.0  # job of warm slots
FORWARD_SHARE = 1 / 3  # time of a forward pass, of that of a training step
LINK_BYTES_S = 100e6  # rate at which data reach a server on another machine
LEAST_S = 2.0  # a call that saves less is not distributed by default


def estimate_gain(record: Mapping[str, Any], arguments: Mapping[str, Any], *, remote: bool) -> float:
    """Return the seconds that the cluster saves; negative if it is slower.

    Args:
        record: ``history.nfdt`` of the last fit of the model.
        arguments: Arguments of the call by name; its data are arrays.
        remote: Whether the server is another machine.
    """
    arrays = training_data.leaves([arguments.get(name) for name in ("x", "y", "sample_weight")])
    samples, size = len(arrays[0]), int(arguments["batch_size"] or 32)
    if arguments["steps"]:
        samples = min(samples, int(arguments["steps"]) * size)
    measured = [worker for worker in record.values() if worker.get("step_s") and worker.get("batch_size")]
    if not measured:
        return -START_S
    sample_s = min((one["step_s"] - one.get("step_exchange_s", 0.0)) / one["batch_size"] for one in measured)
    devices = {(worker.get("host"), worker.get("device")) for worker in record.values()}
    compute_s = FORWARD_SHARE * samples * max(0.0, sample_s)
    sent = sum(int(getattr(array, "nbytes", 0)) for array in arrays) if remote else 0
    return -(-samples // size) * BATCH_S + compute_s * (1 - 1 / len(devices)) - START_S - sent / LINK_BYTES_S
