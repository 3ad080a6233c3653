"""Processor time of a shard's update with ddc, in copies of its weights, and the speed of the codecs on one core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks.reports.report import Report, arguments
from nfdt.codecs import DECODERS, ErrorFeedback
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.sharding import make_plan
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.manifest import Manifest
from nfdt.shard.building import blocks_of
from nfdt.shard.keras_engine import KerasEngine
from nfdt.shard.loop_engine import LoopEngine
from nfdt.shard.optimizer import build_optimizer
from nfdt.shard.optimizer_state import plain_traits
from nfdt.update_rules import make_rule
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_sgd import DelayedSGD

SEED = 1
RUNS, REPEATS = 5, 5
SHAPES = {"0.1M": (100, 1000), "2.5M": (2500, 1000), "25M": (25_000, 1000)}
QUICK = {name: SHAPES[name] for name in ("0.1M", "2.5M")}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(1e-4, weight_decay=0.01),
}
CODECS = ("bf16", "fp16", "int8", "int4")


def manifest_of(optimizer: Any, shape: tuple[int, int], slots: int) -> Manifest:
    """Return the manifest of a program with one kernel of this shape."""
    scalar, whole = {"shape": [], "variable": -1}, {"shape": list(shape), "dtype": "float32", "variable": 0}
    return Manifest(
        {
            "layout": ParameterLayout.of([("kernel", shape)]).to_json(),
            "optimizer": keras.saving.serialize_keras_object(optimizer),
            "optimizer_attributes": {},
            "optimizer_variables": [{**scalar, "dtype": "int64"}, {**scalar, "dtype": "float32"}, *[whole] * slots],
            "elementwise": True,
            "divisible": True,
            "constraints": [None],
            "decay": [True],
            "tables": [],
        }
    )


def engines(name: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the two engines of a shard for one kernel."""
    optimizer = OPTIMIZERS[name]()
    manifest = manifest_of(optimizer, shape, 1 if name == "sgd" else 2)
    plan, traits = make_plan(manifest, 0, 1), plain_traits(manifest)
    assert traits is not None, "both optimizers are plain"
    weights = np.random.default_rng(SEED).normal(0, 0.05, plan.layout.size).astype(np.float32)
    blocks = blocks_of(manifest, manifest.layout.cut(1)[0])
    rule = make_rule(resolve_algorithm("ddc-asgd"), traits, blocks)
    assert isinstance(rule, DelayedSGD | DelayedAdam), "ddc owns both optimizers"
    built = build_optimizer(manifest, plan, weights)
    return {
        "loops": LoopEngine(plan, traits, rule, blocks, weights, manifest.optimizer_options),
        "XLA": KerasEngine(built, rule),
    }


def processor_s(work: Callable[[], Any], repeats: int) -> float:
    """Return the least processor time of the process for one call, in seconds."""
    work()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def pushes(engine: Any) -> Callable[[], None]:
    """Return a function for one push with a delay of one update."""
    gradient = engine.tensor(np.random.default_rng(SEED).normal(0, 0.01, engine.size).astype(np.float32))
    held = [engine.weights(), engine.weights()]

    def push() -> None:
        result = engine.step(gradient, held.pop(0), 1, {}, length=1.0)
        if result.finish is not None:
            result.finish()
        held.append(result.weights)

    return push


def run(report: Report, shapes: dict[str, tuple[int, int]], runs: int, codecs: Sequence[str]) -> None:
    """Measure updates and codecs by turns."""
    for size, shape in shapes.items():
        weights, copy = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        for name in OPTIMIZERS:
            made = {peer: pushes(engine) for peer, engine in engines(name, shape).items()}
            for _ in range(runs):
                report.add(size, "np.copyto", "ms", 1e3 * processor_s(partial(np.copyto, copy, weights), REPEATS))
                for peer, push in made.items():
                    report.add(size, f"{name}, {peer}", "ms", 1e3 * processor_s(push, REPEATS))
        values = {(row.case, row.peer): row.value for row in report.rows}
        for name in OPTIMIZERS:
            report.ratios[f"{name}/copy@{size}"] = values[size, f"{name}, loops"] / values[size, "np.copyto"]
            report.ratios[f"XLA/loops {name}@{size}"] = values[size, f"{name}, XLA"] / values[size, f"{name}, loops"]
    vector = np.random.default_rng(SEED).normal(0, 0.01, 2_500_000).astype(np.float32)
    feedback, out = ErrorFeedback(vector.size), np.empty_like(vector)
    for name in codecs:
        codec, whole = DECODERS[name], [slice(0, vector.size)]
        payload = codec.encode(vector)
        for _ in range(runs):
            for what, work in (
                ("encode", partial(codec.encode, vector)),
                ("encode with feedback", partial(feedback.encode, codec, vector, whole)),
                ("decode", partial(codec.decode, payload, out)),
            ):
                report.add(name, what, "GB/s", vector.nbytes / processor_s(work, REPEATS) / 1e9)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    report = Report("update", [SEED])
    run(report, QUICK if options.quick else SHAPES, 2 if options.quick else RUNS, CODECS)
    report.finish(options.json)


if __name__ == "__main__":
    main()
