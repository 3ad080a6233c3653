"""Embedding of which a step uses one percent: pushed and pulled by rows, and as one dense vector."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.reports.report import Report, Row
from benchmarks.workloads.shards import TOKEN, served
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import Rows, RowVector, RowWeights, TableLayout
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire.job_token import worker_token
from nfdt.model.program.manifest import Manifest
from nfdt.transport.stream import StreamClient

WIDTH, TOUCHED = 64, 0.01
BATCHES = 8
SEED = 1

Step = Callable[[], int]
"""A push with its reply; returns the bytes it moved."""


def layout_of(words: int) -> ParameterLayout:
    """Return the layout of a table followed by a small layer."""
    return ParameterLayout.of([("table", (words, WIDTH)), ("kernel", (WIDTH, 10)), ("bias", (10,))])


def serve(pipe: Connection, layout: ParameterLayout, by_rows: bool) -> None:
    """Serve a shard in this process until the process is terminated."""
    import keras

    from nfdt.model.program.state import State
    from nfdt.shard.servicer import start_shard

    scalar = {"shape": [], "variable": -1}
    entries = {
        "layout": layout.to_json(),
        "optimizer": keras.saving.serialize_keras_object(keras.optimizers.SGD(1e-4)),
        "optimizer_variables": [{**scalar, "dtype": "int64"}, {**scalar, "dtype": "float32"}],
        "elementwise": True,
        "divisible": True,
        "tables": [0],
    }
    row = resolve_algorithm("asgd", sparse=by_rows)
    state = State(np.zeros(layout.size, np.float32))
    running = start_shard(Manifest(entries), state, row, 0, 1, workers=1, token=TOKEN, leased=False)
    pipe.send(running.address)
    pipe.recv()


def batches(layout: ParameterLayout) -> list[RowVector]:
    """Return gradients, each with different rows."""
    rng, words = np.random.default_rng(SEED), layout.slots[0].shape[0]
    found = []
    for _ in range(BATCHES):
        index = np.sort(rng.choice(words, int(words * TOUCHED), replace=False)).astype(np.int32)
        values = rng.normal(0, 0.01, (index.size, WIDTH)).astype(np.float32)
        found.append(RowVector(rng.normal(0, 0.01, WIDTH * 10 + 10).astype(np.float32), (Rows(index, values),)))
    return found


@contextmanager
def worker(layout: ParameterLayout, *, by_rows: bool, share_memory: bool) -> Iterator[Step]:
    """Connect one worker to its shard; replies are written into the worker's own table."""
    gradients: list[Any] = batches(layout)
    split, table = TableLayout.of(layout, (0,)), np.zeros(layout.slots[0].shape, np.float32)
    if not by_rows:
        dense = np.zeros_like(table)
        dense[gradients[0].rows[0].index] = gradients[0].rows[0].values
        gradients = [split.join(gradients[0].dense, [dense])]
    with served(serve, layout, by_rows) as (address, _):
        tables = (0,) if by_rows else ()
        token = worker_token(TOKEN, "worker-0")
        client = StreamClient([address], layout, "worker-0", token, tables=tables, share_memory=share_memory)
        client.pull()
        turn = 0

        def step() -> int:
            nonlocal turn
            turn, before = turn + 1, client.bytes_sent + client.bytes_received
            weights: Any = client.push(gradients[turn % len(gradients)], samples=1).weights
            for news in weights.pop_changes() if isinstance(weights, RowWeights) else ():
                if isinstance(news.rows, Rows):
                    table[news.rows.index] = news.rows.values
            return client.bytes_sent + client.bytes_received - before

        try:
            yield step
        finally:
            client.close()


def measure(step: Step, seconds: float) -> tuple[float, float]:
    """Return round trips per second and bytes per round trip, over at least ``seconds`` and three round trips."""
    count, moved, began = 0, 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        moved, count = moved + step(), count + 1
    return count / (time.perf_counter() - began), moved / count


def run(report: Report, words: int, *, seconds: float, runs: int, transports: tuple[str, ...] = ("tcp", "shm")) -> None:
    """Measure rows and dense in turn, over each transport."""
    case = f"embedding {words:,} x {WIDTH}, {TOUCHED:.0%}"
    for transport in transports:
        with ExitStack() as stack:
            options = {"share_memory": transport == "shm"}
            steps = {
                name: stack.enter_context(worker(layout_of(words), by_rows=name == "rows", **options))
                for name in ("rows", "dense")
            }
            for step in steps.values():
                measure(step, 0.0)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
            for _ in range(runs):
                for name, step in steps.items():
                    found[name].append(measure(step, seconds))
        for name, values in found.items():
            report.rows.append(Row(case, f"{transport}, {name}", "round trips/s", [pace for pace, _ in values]))
            report.rows.append(Row(case, f"{transport}, {name}", "bytes", [size for _, size in values]))
        pairs = list(zip(found["dense"], found["rows"], strict=True))
        label = f"dense/rows@{transport}"
        report.ratios[f"time {label}"] = statistics.median(rows[0] / dense[0] for dense, rows in pairs)
        report.ratios[f"bytes {label}"] = statistics.median(dense[1] / rows[1] for dense, rows in pairs)
