"""One rank that times allreduce steps with and without buckets: ``python -m benchmarks.workloads.bucket_rank``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.workloads.models import SEED, build
from benchmarks.workloads.ring_rank import RESULT, serve_store

WARM_UP = 3
ONE = 2**40  # elements of a bucket that takes every model
PEERS = ("buckets", "one reduction")


def make_step(case: str, bucket: int, reduce: Any, batch: Any) -> Any:
    """Return the step of a model with buckets of at least so many elements."""
    import keras

    from hfdt.runtime import step as steps
    from hfdt.runtime.tensorflow_ranks import HorovodRanks
    from nfdt.model.program.pack import pack
    from nfdt.model.program.state import load_state

    model = build(case, keras)
    packed = pack(model, batch)
    steps.BUCKET = bucket
    state, shared = load_state(packed.artifacts[packed.manifest.state]), steps.DenominatorInGraph(HorovodRanks())
    return steps.AllreduceStep(model, packed.manifest, state, reduce, shared)


def main(argv: Sequence[str] | None = None) -> int:
    """Join the world of this environment and, as rank 0, print the seconds per step of each peer as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--store", metavar="HOSTS", help="run the rendezvous store of a world on these hosts")
    options = parser.parse_args(argv)
    store = serve_store(options.store) if options.store else None
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hfdt.runtime import step as steps

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    random = np.random.default_rng(SEED)
    images = random.random((options.batch, 28, 28, 1), dtype=np.float32)
    batch = images, random.integers(0, 10, options.batch)
    made = {}
    for peer, bucket in zip(PEERS, (steps.BUCKET, ONE), strict=True):

        def reduce(gradient: Any, name: str, peer: str = peer) -> Any:
            return hvd.allreduce(gradient, op=hvd.Sum, name=f"{peer.replace(' ', '_')}.{name}")

        made[peer] = make_step(options.case, bucket, reduce, batch)
    found: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for run in range(options.runs + 1):
        for peer, step in made.items():
            began = time.perf_counter()
            for _ in range(options.steps if run else WARM_UP):
                step(batch, 1 / hvd.size())
            step.weights()
            if run:
                found[peer].append((time.perf_counter() - began) / options.steps)
    if hvd.rank() == 0:
        print(f"{RESULT}{json.dumps(found)}", flush=True)
    hvd.shutdown()
    if store is not None:
        store.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
