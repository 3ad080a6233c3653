"""One to four shards, one to sixteen workers pushing at full speed, memory per worker, leases per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.reports.report import Report, Row, arguments
from benchmarks.run.wire import SEED, per_second
from benchmarks.workloads.shards import TOKEN, layout_of, serve_shard, served
from nfdt.consistency import make_policy
from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.clock import SystemClock
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.job_token import worker_token
from nfdt.core.work.instructions import Work
from nfdt.core.work.messages import to_reply, to_report
from nfdt.transport.stream import StreamClient

WORKERS = (1, 2, 4, 8, 16)
SHARDS = (1, 2, 4)
SIZES = {"0.25M": 250_000, "2.5M": 2_500_000}
VARIABLES = 8  # a model is divided between its variables
ALGORITHM = "ddc-asgd"
SOME_WORKERS = 4  # with this number of workers, the memory that a shard shares between all workers is allocated


def push(pipe: Connection, addresses: list[str], layout: ParameterLayout, name: str) -> None:
    """Run a worker that pushes for the seconds received from the pipe and sends back the pushes per second."""
    gradient = np.random.default_rng(SEED).normal(0, 0.01, layout.size).astype(np.float32)
    client = StreamClient(addresses, layout, name, worker_token(TOKEN, name))
    client.pull()
    client.push(gradient, samples=1)
    pipe.send(name)
    while True:
        seconds = pipe.recv()
        pipe.send(per_second(lambda: client.push(gradient, samples=1) and None, seconds))


@contextmanager
def shards_of(layout: ParameterLayout, shards: int, workers: int) -> Iterator[tuple[list[str], list[Connection]]]:
    """Start shards; yield their addresses and the pipes that query their memory."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(served(serve_shard, layout, ALGORITHM, index, shards, workers))
            for index in range(shards)
        ]
        yield [address for address, _ in running], [pipe for _, pipe in running]


def pushes_per_s(pipes: list[Connection], seconds: float) -> float:
    """Return the pushes per second of all workers together, which push concurrently at full speed."""
    for pipe in pipes:
        pipe.send(seconds)
    return sum(pipe.recv() for pipe in pipes)


def private_bytes(pipes: list[Connection]) -> int:
    """Return the memory of all shards, excluding the segments shared with workers."""
    for pipe in pipes:
        pipe.send("memory")
    return sum(pipe.recv() for pipe in pipes)


def more_workers(report: Report, case: str, size: int, workers: tuple[int, ...], *, seconds: float, runs: int) -> None:
    """Measure pushes per second into one shard as workers are added, and its memory per worker and parameter."""
    layout = layout_of(size)
    rates: dict[int, list[float]] = {}
    memory: dict[int, int] = {}
    with ExitStack() as stack:
        addresses, shards = stack.enter_context(shards_of(layout, 1, workers[-1]))
        pipes: list[Connection] = []
        for count in workers:
            names = [f"worker-{i}" for i in range(len(pipes), count)]
            pipes += [stack.enter_context(served(push, addresses, layout, name))[1] for name in names]
            rates[count] = [pushes_per_s(pipes, seconds) for _ in range(runs)]
            memory[count] = private_bytes(shards)
    report.rows += [Row(case, f"{count} workers", "pushes/s", values) for count, values in rates.items()]
    first, last = workers[0], workers[-1]
    report.ratios[f"workers{last}/workers{first}@{case}"] = statistics.median(rates[last]) / statistics.median(
        rates[first]
    )
    some = next((count for count in workers[:-1] if count >= SOME_WORKERS), first)
    each = (memory[last] - memory[some]) / (last - some) / size
    report.rows.append(Row(case, "a worker more", "bytes per parameter", [each]))


def more_shards(report: Report, case: str, size: int, shards: tuple[int, ...], *, seconds: float, runs: int) -> None:
    """Measure the pushes per second of one worker for growing numbers of shards."""
    layout = layout_of(size, VARIABLES)
    rates: dict[int, list[float]] = {}
    for count in shards:
        with shards_of(layout, count, 1) as (addresses, _), served(push, addresses, layout, "worker-0") as (_, pipe):
            rates[count] = [pushes_per_s([pipe], seconds) for _ in range(runs)]
    report.rows += [Row(case, f"{count} shards", "pushes/s", values) for count, values in rates.items()]
    first, last = shards[0], shards[-1]
    report.ratios[f"shards{last}/shards{first}@{case}"] = statistics.median(rates[last]) / statistics.median(
        rates[first]
    )


def leases_per_s(workers: int, seconds: float) -> float:
    """Return the leases that a coordinator grants per second, with all work of a call of Next except the network."""
    samples = 10_000_000
    spec = JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("ssp", staleness_bound=10),  # leases of one task
        cluster=ClusterSpec(workers=workers),
        fit=FitSpec(epochs=1, batch_size=1, shuffle=False),
        train=DataSpec(kind="arrays", arrays=("0" * 64,), samples=samples),
        attended=False,
    )
    coordinator = Coordinator(spec, make_policy(spec.algorithm), SystemClock())
    names = [f"worker-{index}" for index in range(workers)]
    answers = {name: pb.NextRequest(worker=name) for name in names}
    for index, name in enumerate(names):
        coordinator.joined(name, index)
    leased, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for name in names:
            instruction = coordinator.next(name, to_report(answers[name]))
            reply = pb.NextReply.FromString(to_reply(instruction).SerializeToString())
            answers[name] = pb.NextRequest(worker=name)
            if isinstance(instruction, Work):
                leased += len(instruction.tasks)
                for task in reply.work.tasks:
                    answers[name].finished.add(task=task.task, samples=1)
    return leased / (time.perf_counter() - began)


def run(
    report: Report,
    sizes: dict[str, int],
    *,
    seconds: float,
    runs: int,
    workers: tuple[int, ...] = WORKERS,
    shards: tuple[int, ...] = SHARDS,
) -> None:
    """Measure workers, shards and leases."""
    for case, size in sizes.items():
        more_workers(report, case, size, workers, seconds=seconds, runs=runs)
        more_shards(report, case, size, shards, seconds=seconds, runs=runs)
    leases = [leases_per_s(workers[-1], seconds) for _ in range(runs)]
    report.rows.append(Row("coordinator", f"{workers[-1]} workers", "leases/s", leases))
    report.ratios["leases_per_s"] = statistics.median(leases)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("scale", [SEED])
    if options.quick:
        run(report, {"0.25M": SIZES["0.25M"]}, seconds=0.5, runs=1, workers=(1, 4, 16), shards=(1, 2))
    else:
        run(report, SIZES, seconds=1.0, runs=5)
    report.finish(options.json)


if __name__ == "__main__":
    main()
