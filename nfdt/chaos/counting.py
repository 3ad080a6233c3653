"""A model whose weights count how often each sample was trained: what a trial is judged by.

Sample ``i`` looks up row ``i`` of an embedding and nothing else. Its gradient exceeds the clipping value of the
optimizer by far, whatever the update divides it by (samples of a batch, parts of a round). Each applied update of a
batch with the sample therefore moves the row by exactly -1, and no event of the job is involved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nfdt.chaos.accounting import SampleCounts
from nfdt.chaos.timing import PlannedFault
from nfdt.core.errors import NfdtError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import resolve_algorithm

SAMPLES, BATCH = 1536, 8
FAR = -1e4  # target: rows move towards it at every step
MOST_EPOCHS = 10_000
AFTER_S = 3.0  # training goes on that long after the last fault, and for two epochs


def counting_script(result: Path, *, steps: int = 0, seconds: float = 0.0) -> str:
    """Return a script that calls :func:`train`, whose arguments these are."""
    return f"from nfdt.chaos.counting import train\n\ntrain({str(result)!r}, steps={steps}, seconds={seconds})\n"


def length_for(faults: Sequence[PlannedFault[Any]]) -> dict[str, Any]:
    """Return the arguments of :func:`counting_script` for a training that goes on until the faults are over."""
    ends_s = [fault.at_s + (fault.row.seconds or 0.0) + AFTER_S for fault in faults if fault.at_s is not None]
    steps = [fault.at_step for fault in faults if fault.at_step is not None]
    return {"steps": max(steps, default=0), "seconds": max(ends_s, default=0.0)}


def train(result: str, *, steps: int, seconds: float) -> None:
    """Train the model for so many steps and seconds, and two epochs more; write the counts as JSON.

    Args:
        result: Path of the file: ``{"epochs": number of epochs, "times": {times trained: number of samples}}``.
        steps: Least number of steps.
        seconds: Least duration of the training.
    """
    import keras
    import numpy as np

    began_at = time.monotonic()

    class Enough(keras.callbacks.Callback):
        """Ends the training with the epoch after which it has lasted long enough."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Decide at the end of an epoch."""
            if (epoch - 1) * SAMPLES >= steps * BATCH and time.monotonic() - began_at >= seconds:
                self.model.stop_training = True

    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros"),
            keras.layers.Flatten(),
        ]
    )
    model.compile(keras.optimizers.SGD(1.0, clipvalue=1.0), "mean_squared_error")
    numbers = np.arange(SAMPLES, dtype="int32")[:, None]
    targets = np.full((SAMPLES, 1), FAR, "float32")
    history = model.fit(numbers, targets, batch_size=BATCH, epochs=MOST_EPOCHS, verbose=0, callbacks=[Enough()])
    times, samples = np.unique(-model.get_weights()[0].ravel(), return_counts=True)
    counts = {str(float(count)): int(number) for count, number in zip(times, samples, strict=True)}
    Path(result).write_text(json.dumps({"epochs": history.epoch[-1] + 1, "times": counts}), encoding="utf-8")


def read_counts(result: Path) -> SampleCounts:
    """Return the samples that :func:`train` has counted, over all epochs.

    Raises:
        NfdtError: The file is missing, or a sample was moved by a part of an update.
    """
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NfdtError(f"The counting model has left no counts: {error}") from None
    epochs, times = int(found["epochs"]), {float(count): int(samples) for count, samples in found["times"].items()}
    if broken := [count for count in times if count != int(count)]:
        raise NfdtError(f"Counting model: expected updates that move a sample by 1. Received: {broken[0]:g} in all.")
    return SampleCounts(
        once=int(sum(min(count, epochs) * samples for count, samples in times.items())),
        again=int(sum(max(0.0, count - epochs) * samples for count, samples in times.items())),
        never=int(sum(max(0.0, epochs - count) * samples for count, samples in times.items())),
    )


def why_not_counted(options: Mapping[str, Any]) -> str:
    """Return why the weights of a job with these options of ``nfdt run`` do not count its samples; "" if they do."""
    parts = {name: value for name, value in options.items() if name in AlgorithmSpec.model_fields and name != "name"}
    algorithm = resolve_algorithm(options.get("algorithm"), **parts)
    if not algorithm.topology_facts.flat or algorithm.plan == "topology":
        return "groups and allreduce rings promise no exact count"
    if algorithm.consistency_facts.merges:
        return f"consistency={algorithm.consistency!r} averages gradients of several batches"
    if algorithm.codec != "identity" or algorithm.reply_codec not in (None, "identity"):
        return f"codec={algorithm.codec!r} sends approximations"
    if algorithm.batch_facts.follows_speed:
        return f"batch={algorithm.batch!r} scales the learning rate of each batch"
    return ""
