"""One training of ``scripts/bench gpu``, in a process of its own, so that its memory on the device ends with it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import nfdt
from benchmarks.workloads.device import device_name
from benchmarks.workloads.epochs import measured, now, watch_epochs
from benchmarks.workloads.gpt_script import GptSize
from benchmarks.workloads.gpt_script import build as build_transformer
from benchmarks.workloads.models import SEED
from benchmarks.workloads.models import build as build_images
from nfdt.cli.trace import trace_of
from nfdt.core.work.spans import APPLY, KINDS

EPOCHS = 4  # the first one traces, and the last one is left out
LEAST_STEPS, MOST_STEPS = 8, 400  # of an epoch
SPANS_S = 10.0  # time for the shard to deliver its spans
VOCABULARY = 256


@dataclass(frozen=True)
class Case:
    """A model, and its batches.

    Attributes:
        transformer: Size of a GPT-like model; None: a CNN of 1 M weights.
        batch: Samples of a batch.
        sequence: Tokens of a sample; 0 for images.
    """

    transformer: GptSize | None
    batch: int
    sequence: int = 0

    def build(self) -> Any:
        """Return the compiled model."""
        if self.transformer is None:
            return build_images("cnn", keras)
        keras.utils.set_random_seed(SEED)
        model = build_transformer(self.transformer, self.sequence)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-4), loss)
        return model

    def data(self, steps: int) -> tuple[Any, Any]:
        """Return random samples and targets of so many batches."""
        random, samples = np.random.default_rng(0), steps * self.batch
        if self.transformer is None:
            return random.random((samples, 28, 28, 1), "float32"), random.integers(0, 10, samples)
        tokens = random.integers(0, VOCABULARY, (samples, self.sequence + 1)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]


CASES = {
    "CNN, 1 M": Case(None, 128),
    "transformer, 25 M": Case(GptSize(8, 512, VOCABULARY), 16, 128),
    "transformer, 100 M": Case(GptSize(8, 1024, VOCABULARY), 16, 128),
}
SMALL = {
    "CNN, 1 M": Case(None, 32),
    "transformer, 25 M": Case(GptSize(8, 512, VOCABULARY), 2, 16),
    "transformer, 100 M": Case(GptSize(8, 1024, VOCABULARY), 2, 16),
}
"""The same models with batches for processors."""


def steps_of(case: Case, epoch_s: float) -> int:
    """Return the number of steps that plain Keras makes in so many seconds."""
    model, (x, y) = case.build(), case.data(LEAST_STEPS)
    options = {"batch_size": case.batch, "verbose": 0}
    model.fit(x, y, **options)
    began = now()
    model.fit(x, y, **options)
    return min(MOST_STEPS, max(LEAST_STEPS, round(epoch_s * LEAST_STEPS / (now() - began))))


def train(case: Case, steps: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Train, plain or with these options of a session; return what was measured.

    Speed is in samples/s, times are in ms.
    """
    model, (x, y) = case.build(), case.data(steps)
    watch, begins = watch_epochs(keras)
    began = now()
    arguments = {"batch_size": case.batch, "epochs": EPOCHS, "verbose": 0, "callbacks": [watch]}
    found: dict[str, Any] = {"steps": steps}
    if options is None:
        model.fit(x, y, **arguments)
        found["device"] = device_name()
    else:
        with nfdt.session(**options) as session:
            history = model.fit(x, y, **arguments)
            found |= {"ms of an update": 1000 * update_s(session.connection())}
        workers = history.nfdt.values()
        for name, key in (("ms of a step", "step_s"), ("ms of it for the exchange", "step_exchange_s")):
            found[name] = 1000 * statistics.mean(worker[key] for worker in workers)
    speed = measured(begins, len(x), began)
    return found | {"samples/s": speed.samples_per_s, "s of start-up": speed.startup_s}


def update_s(connection: Any) -> float:
    """Return the median time in which a shard of the last job applied a push, in seconds; 0 if it has not said so."""
    job = connection.list()[-1].job_id
    deadline = time.monotonic() + SPANS_S
    while time.monotonic() < deadline:
        events = trace_of(connection.trace(job), [])["traceEvents"]
        if durations := [event["dur"] for event in events if event.get("name") == KINDS[APPLY]]:
            return statistics.median(durations) / 1e6
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--epoch-s", type=float, default=0.0, help="measure so long epochs of plain Keras")
    parser.add_argument("--steps", type=int, default=0, help="of an epoch")
    parser.add_argument("--options", type=json.loads, help="of the session, as JSON; default: plain Keras")
    chosen = parser.parse_args()
    case = (SMALL if chosen.small else CASES)[chosen.case]
    print(json.dumps(train(case, chosen.steps or steps_of(case, chosen.epoch_s), chosen.options)))


if __name__ == "__main__":
    main()
