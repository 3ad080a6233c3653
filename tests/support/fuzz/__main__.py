"""``scripts/fuzz``: send made-up bytes and calls to every port, then check the memory and the work of the processes."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import click
import psutil

from nfdt.core.wire.channel import open_channel
from tests.support.fuzz import made_up
from tests.support.fuzz.targets import JobServer, Shard, call, send

GROWTH = 0.05
WARM_UP = 0.2  # part of the time before the memory is measured first
FRAMES = "frames that a shard answered"
Attack = Callable[[Random], int]


class Traffic:
    """Threads of attacks, and the number of frames, connections and calls that each kind has sent."""

    def __init__(self, attacks: dict[str, Attack], seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self.failures: list[str] = []
        self._until = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(kind, attack, Random(f"{seed} {kind}")), daemon=True)
            for kind, attack in attacks.items()
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, kind: str, attack: Attack, random: Random) -> None:
        try:
            while not self._until.is_set():
                self.sent[kind] += attack(random)
        except Exception as error:  # reported at the end
            self.failures.append(f"{kind}: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """End all threads after their current attack."""
        self._until.set()
        for thread in self._threads:
            thread.join()


@click.command()
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True)
@click.option("--seed", default=1, show_default=True, help="Of the made-up messages; the timing differs in each run.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="For each kind of traffic.")
@click.option("--tls", is_flag=True, help="The job server, its page and the shards of its jobs use TLS.")
def main(minutes: float, seed: int, threads: int, tls: bool) -> None:
    """Send made-up bytes and calls to a job server that trains two jobs, and to a shard; then check both."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        server, shard = JobServer(Path(folder), 60 * minutes, undo, tls=tls), Shard(undo)
        ports, page = [*server.ports(), *shard.ports()], server.page_port
        kinds: dict[str, Attack] = {
            "connections": lambda random: _send(random.choice(ports), made_up.connection(random), tls, random),
            "requests of the page": lambda random: _send(
                page, made_up.request(random, server.job, server.token), tls, random
            ),
        }
        for name, token in {"with": server.token, "without": "", "with a wrong": "0" * 64}.items():
            channel = undo.enter_context(open_channel(server.address, token, ca_file=server.ca_file))
            kinds[f"messages {name} token"] = lambda random, channel=channel: call(channel, random)
        attacks = {f"{kind}, thread {n}": attack for kind, attack in kinds.items() for n in range(threads)}
        attacks |= {f"{FRAMES}, thread {n}": shard.worker(n) for n in range(threads)}
        traffic = Traffic(attacks, seed)
        time.sleep(60 * minutes * WARM_UP)
        processes = [*server.processes, *shard.processes]
        before = {one.pid: one.memory_info().rss for one in processes}
        time.sleep(60 * minutes * (1 - WARM_UP))
        traffic.stop()
        faults = list(traffic.failures)
        for one in processes:
            if not one.is_running() or one.status() == psutil.STATUS_ZOMBIE:
                faults.append(f"process {one.pid} has ended")
                continue
            growth = one.memory_info().rss / before[one.pid] - 1
            click.echo(f"{one.name():20} {before[one.pid] / 1e6:8.1f} MB {growth:+.1%}")
            if growth > GROWTH:
                faults.append(f"{one.name()}: its memory grew by {growth:.1%}. Expected: at most {GROWTH:.0%}.")
        for kind in (*kinds, FRAMES):
            number = sum(count for name, count in traffic.sent.items() if name.startswith(f"{kind}, "))
            click.echo(f"{kind:32} {number:>10,}")
        server.check()
        shard.check()
        faults += [f"an exception in the server: {text}" for text in server.tracebacks[:3]]
        for fault in faults:
            click.echo(f"fuzz: {fault}", err=True)
    raise SystemExit(bool(faults))


def _send(port: int, data: bytes, tls: bool, random: Random) -> int:
    """Send bytes on a new connection, half of them after a handshake if there is ``tls``."""
    send(port, data, tls=tls and random.random() < 0.5)
    return 1


if __name__ == "__main__":
    main(prog_name="scripts/fuzz")
