"""Small jobs on described clusters, through the client as the command line runs them."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import json

import keras
import numpy as np
from nfdt_client.options import resolve

from nfdt.cli.simulated import SimulatedSession
from nfdt.simulate.cluster import parse_cluster

ROWS, BATCH = 96, 8
FIT = ("batch_size", "callbacks", "sample_weight", "shuffle", "steps_per_epoch", "validation_data", "validation_steps")
X = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
Y = (X @ np.arange(5, dtype="float32")[:, None] + 1).astype("float32")


class Kept(SimulatedSession):
    """Session that keeps submission and manifest of its job."""

    def start(self, submission, manifest):
        self.submission, self.manifest = submission, manifest
        return super().start(submission, manifest)

    def read(self, name):
        return b"".join(content for _, content in self.submission.blobs[name].chunks())


def build(layers=(), rate=0.02, momentum=0.9):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate, momentum=momentum), "mse", metrics=["mae"])
    return model


def cluster(*workers, **tables):
    return parse_cluster({"workers": [{"step_ms": 100, **w} for w in workers], **tables})


def simulate(described, algorithm="asgd", *, model=None, x=X, y=Y, epochs=1, **options):
    """Return the ended job, its session and the History."""
    fit = {name: options.pop(name) for name in FIT if name in options}
    batch = {} if y is None or "batch_size" in fit else {"batch_size": BATCH}
    given = {"algorithm": algorithm, "workers": described.count, **options}
    with Kept(resolve(given, environ={}), described) as session:
        history = (model or build()).fit(x, y, epochs=epochs, verbose=0, **batch, **fit)
    return session.jobs[0], session, history


def as_text(job):
    """Return all results of a job as text, bit for bit."""
    record = job.record
    points = [(p.at_s, p.samples, p.epoch, dict(p.logs)) for p in record.points]
    weights = job.snapshot().weights.tobytes().hex()
    return json.dumps([points, record.answered, sorted(record.staleness.items()), weights])
