"""One job server and thousands of workers that only speak the protocol: attending, idle, leases per second."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.protocol_workers import Counts, attend
from benchmarks.workloads.shards import started
from nfdt.core.wire import jobs_pb2
from tests.support.fakes import VERSIONS, Client, FakeSlot

WORKERS = (256, 1024, 4096)
PER_PROCESS = 1024
STEP_S = 0.5  # that a worker claims for a step: longer than a lease, so that a lease is one task
LIMIT_S = 180.0
POLL_S = 0.1
BATCH, TASKS = 4, 2_000_000  # of the job, which is cancelled before its end


@dataclass(frozen=True)
class Running:
    """A job server, and the processes of its workers."""

    server: psutil.Process
    client: Client
    workers: list[Connection]

    def counts(self) -> Counts:
        """Return the sum of the counts of all processes; the longest time is that of all."""
        for pipe in self.workers:
            pipe.send("counts")
        total = Counts()
        for pipe in self.workers:
            one: Counts = pipe.recv()
            total.attending += one.attending
            total.calls += one.calls
            total.tasks += one.tasks
            total.longest_s = max(total.longest_s, one.longest_s)
            total.failures += one.failures
        return total

    def processor_s(self) -> float:
        """Return the seconds of processor time that the server has used."""
        times = self.server.cpu_times()
        return float(times.user + times.system)


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """Run a job server without slots; yield its process, its address and its token."""
    command = [sys.executable, "-m", "nfdt.jobserver.main", "--state-dir", str(folder), "--no-slots"]
    process = subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())["address"]
        yield psutil.Process(process.pid), address, (folder / "token").read_text().strip()
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return the seconds.

    Raises:
        TimeoutError: It does not hold in time.
    """
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > LIMIT_S:
            raise TimeoutError(f"Expected it within {LIMIT_S:g} s. Received: nothing.")
        time.sleep(POLL_S)
    return time.perf_counter() - began


def share_of_a_core(running: Running, seconds: float) -> float:
    """Return the share of a core, in percent, that the server uses over so many seconds."""
    before, began = running.processor_s(), time.perf_counter()
    time.sleep(seconds)
    return 100 * (running.processor_s() - before) / (time.perf_counter() - began)


def leases(report: Report, case: str, running: Running, spec: dict[str, Any], seconds: float) -> None:
    """Train a job whose steps take no time; add the leases per second and per second of the server's processor."""
    job, client = running.client.submit(spec), running.client
    before = running.counts()
    report.add(case, "one job", "s to its first tasks", until(lambda: running.counts().tasks > before.tasks))
    until(lambda: running.counts().tasks - before.tasks > spec["cluster"]["workers"])
    first, began, used = running.counts(), time.perf_counter(), running.processor_s()
    time.sleep(seconds)
    last, passed, used = running.counts(), time.perf_counter() - began, running.processor_s() - used
    calls, tasks = last.calls - first.calls, last.tasks - first.tasks
    report.add(case, "one job", "leases/s", tasks / passed)
    report.add(case, "one job", "leases per s of processor", tasks / used)
    report.add(case, "one job", "tasks per lease", tasks / max(1, calls))
    report.add(case, "one job", "longest s of an answer", last.longest_s)
    client.control(job, cancel=jobs_pb2.Cancel())
    ended = until(lambda: client.show(job).state == "cancelled")
    report.add(case, "one job", "s to its end", ended)


def measure(report: Report, workers: int, *, idle_s: float, lease_s: float) -> None:
    """Measure one server with this number of workers."""
    case = f"{workers} workers"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server, address, token = stack.enter_context(served(folder))
        client = Client(address, token)
        stack.callback(client.close)
        shard = FakeSlot(address, "shard", "shard", token=token)
        stack.callback(shard.close)
        before = server.memory_info().rss
        fit = {"epochs": 1, "batch_size": BATCH, "shuffle": False}
        spec = client.spec(workers=workers, samples=BATCH * TASKS, fit=fit)
        began, times = time.perf_counter(), server.cpu_times()
        pipes, used_s = [], times.user + times.system
        for start in range(0, workers, PER_PROCESS):
            numbers = range(start, min(start + PER_PROCESS, workers))
            process = stack.enter_context(started(attend, address, token, numbers, VERSIONS, STEP_S))
            pipes.append(process.pipe)
        running = Running(server, client, pipes)
        until(lambda: running.counts().attending >= workers)
        report.add(case, "attending", "s until all attend", time.perf_counter() - began)
        report.add(case, "attending", "s of processor until then", running.processor_s() - used_s)
        time.sleep(2.0)
        report.add(case, "attending", "% of a core, idle", share_of_a_core(running, idle_s))
        report.add(case, "attending", "kB of a worker", (server.memory_info().rss - before) / workers / 1000)
        report.add(case, "attending", "threads of the server", server.num_threads())
        leases(report, case, running, spec, lease_s)
        report.notes += [f"{case}: {text}" for text in running.counts().failures[:3]]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers to measure")
    options = parser.parse_args()
    report = Report("control", [])
    for workers in WORKERS[:1] if options.quick else options.workers:
        measure(report, workers, idle_s=3.0 if options.quick else 20.0, lease_s=3.0 if options.quick else 20.0)
    report.finish(options.json)


if __name__ == "__main__":
    main()
