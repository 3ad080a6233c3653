"""A model whose weights count how often each sample was trained: what a trial is judged by.

Sample ``i`` looks up row ``i`` of an embedding and nothing else. Its gradient exceeds the clipping value of the
optimizer by far, whatever the update divides it by (samples of a batch, parts of a round). Each applied update of a
batch with the sample therefore moves the row by exactly -1, and no event of the job is involved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nfdt.chaos.accounting import SampleCounts
from nfdt.chaos.schedule import PlannedFault
from nfdt.core.errors import NfdtError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import resolve_algorithm

AFTER_S = 4.0  # training goes on that long after the last fault
# A script of Keras alone; it trains for two epochs more than it has to. Rows move towards the target at every step.
SCRIPT = """
import json
import time

import keras
import numpy as np

RESULT, STEPS, SECONDS = {result!r}, {steps!r}, {seconds!r}
SAMPLES, BATCH, TARGET = 1536, 8, -1e4


class Enough(keras.callbacks.Callback):
    began_at = None

    def on_epoch_begin(self, epoch, logs=None):
        self.began_at = self.began_at or time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if (epoch - 1) * self.params["steps"] >= STEPS and time.monotonic() - self.began_at >= SECONDS:
            self.model.stop_training = True


embedding = keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros")
model = keras.Sequential([keras.Input((1,), dtype="int32"), embedding, keras.layers.Flatten()])
model.compile(keras.optimizers.SGD(1.0, clipvalue=1.0), "mean_squared_error")
numbers, targets = np.arange(SAMPLES, dtype="int32")[:, None], np.full((SAMPLES, 1), TARGET, "float32")
history = model.fit(numbers, targets, batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[Enough()])
found = zip(*np.unique(-model.get_weights()[0].ravel(), return_counts=True), strict=True)
times = {{str(float(count)): int(samples) for count, samples in found}}
with open(RESULT, "w") as file:
    json.dump({{"epochs": history.epoch[-1] + 1, "times": times}}, file)
"""


def counting_script(result: Path, *, steps: int = 0, seconds: float = 0.0) -> str:
    """Return a script that trains the model for at least so many steps and seconds.

    It writes a JSON file: ``{"epochs": number of epochs, "times": {times trained: number of samples}}``.
    """
    return SCRIPT.format(result=str(result), steps=steps, seconds=seconds)


def length_for(faults: Sequence[PlannedFault[Any]]) -> dict[str, Any]:
    """Return the arguments of :func:`counting_script` for a training that goes on until the faults are over."""
    ends_s = [fault.at_s + (fault.row.seconds or 0.0) + AFTER_S for fault in faults if fault.at_s is not None]
    steps = [fault.at_step for fault in faults if fault.at_step is not None]
    return {"steps": max(steps, default=0), "seconds": max(ends_s, default=0.0)}


def read_counts(result: Path) -> SampleCounts:
    """Return the samples that the script has counted, over all epochs.

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
    if algorithm.codec_facts.encodes or algorithm.encodes_replies:
        return f"codec={algorithm.codec!r} sends approximations"
    if algorithm.batch_facts.follows_speed:
        return f"batch={algorithm.batch!r} scales the learning rate of each batch"
    return ""
