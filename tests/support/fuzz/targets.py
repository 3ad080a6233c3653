"""Targets of made-up traffic: real processes, and the check that they still do their work."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random

import grpc
import psutil
from google.protobuf.descriptor import MethodDescriptor
from nfdt_client.connection import JobsClient

from nfdt.chaos.accounting import RecordedJobs, counting_script, first_progress, read_counts
from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.wire import jobs_pb2, shards_pb2, workers_pb2
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import ERROR, Frame
from nfdt.transport.stream import StreamClient
from tests.support.certificates import self_signed
from tests.support.fuzz import made_up
from tests.support.raw_stream import exchange
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, descendants, environment, start_server, stop
from tests.support.shard_cluster import LAYOUT, gradients

CALL_S = 0.1  # limit of a call: some of them stream until the job ends
SILENCE_S = 0.2
POLL_S = 0.2
KEY = "key-of-a-job"
FRAMES = 1000  # in one stream
RING_STEP_MS = 500
RING_EPOCH_S = 7 * RING_STEP_MS / 1000  # of two ranks, at least: 1797 samples in batches of 128 for each
Process = subprocess.Popen[bytes]
SHARD = """
import sys, keras
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from tests.support.shard_cluster import Reference, rule_spec
reference = Reference(keras.optimizers.SGD(0.1, momentum=0.9))
state = State(reference.weights, reference.state)
shard = start_shard(reference.manifest(), state, rule_spec("ddc"), 0, 1, workers=5, token=sys.argv[1], leased=False)
print(shard.address, flush=True)
sys.stdin.read()
"""
_SERVICES = (
    *jobs_pb2.DESCRIPTOR.services_by_name.values(),
    *workers_pb2.DESCRIPTOR.services_by_name.values(),
    *shards_pb2.DESCRIPTOR.services_by_name.values(),
)
METHODS: list[MethodDescriptor] = [method for service in _SERVICES for method in service.methods]


def send(port: int, data: bytes, *, tls: bool = False) -> None:
    """Send bytes on a new connection, after a TLS handshake or without; read until its end, or until silence."""
    with suppress(OSError), ExitStack() as undo:
        one = undo.enter_context(socket.create_connection(("127.0.0.1", port), SILENCE_S))
        if tls:
            one = undo.enter_context(ssl._create_unverified_context().wrap_socket(one))
        one.settimeout(SILENCE_S)
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        while one.recv(2**16):
            continue


def call(channel: grpc.Channel, random: Random) -> int:
    """Call a method with made-up messages; return their number."""
    method = random.choice(METHODS)
    path = f"/{method.containing_service.full_name}/{method.name}"
    sent = [made_up.message(method.input_type, random).SerializeToString() for _ in range(random.randrange(1, 4))]
    sent = [made_up.mutated(data, random) if random.random() < 0.3 else data for data in sent]
    stub = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
    with suppress(grpc.RpcError):
        for _ in stub(iter(sent), timeout=CALL_S):
            continue
    return len(sent)


def listening(processes: Iterable[psutil.Process]) -> list[int]:
    """Return the ports on which processes listen."""
    found = (each for process in processes for each in process.net_connections("tcp"))
    return sorted({one.laddr.port for one in found if one.status == psutil.CONN_LISTEN})


class JobServer:
    """Job server with workers and a page; a job that counts its samples and a ring train while the traffic arrives.

    Args:
        folder: Folder for state and logs.
        seconds: Duration of the jobs, at least.
        undo: Ends the processes.
        tls: Whether its ports, and those of the jobs' shards, use TLS.

    Attributes:
        token: Token of an administrator.
        address: Address of the service.
        ca_file: Certificate of its authority; None without TLS.
        job: The job that counts.
    """

    def __init__(self, folder: Path, seconds: float, undo: ExitStack, *, tls: bool) -> None:
        self._folder, self._counts = folder, folder / "counts.json"
        pair = self_signed(folder, "server") if tls else None
        files = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)] if pair else []
        self._server = start_server(folder, "--workers", "4", "--ui", "127.0.0.1:0", *files)
        undo.callback(stop, self._server.process)
        self.token = self._server.token_file.read_text()
        self.address, self.ca_file = self._server.address, pair and str(pair.cert)
        trusted = {"NFDT_CA_FILE": self.ca_file} if self.ca_file else {}
        self._environment = environment(**self._server.env(), **trusted)
        ring = DIGITS + f"build().fit(x, y, batch_size=128, epochs={1 + int(seconds / RING_EPOCH_S)}, verbose=0)"
        counting = self._start("counting.py", counting_script(self._counts, seconds=seconds), 1, "algorithm=asgd", undo)
        self.job = self._trained_job(1)
        step = f"emulate.step_ms={RING_STEP_MS}"
        self._scripts = [counting, self._start("ring.py", ring, 2, "algorithm=allreduce", undo, step)]
        self._ring = self._trained_job(2)

    def _start(self, name: str, text: str, workers: int, algorithm: str, undo: ExitStack, *more: str) -> Process:
        script = self._folder / name
        script.write_text(text)
        options = [word for option in (algorithm, *more) for word in ("--set", option)]
        command = [*NFDT, "run", "--workers", str(workers), *options, str(script)]
        process = subprocess.Popen(command, env=self._environment, cwd=self._folder)
        undo.callback(stop, process)
        return process

    def _trained_job(self, number: int) -> str:
        """Wait until the job of this number trains, and return its name."""
        recorded, deadline = RecordedJobs(self._server.state_dir), time.monotonic() + DEADLINE_S
        while first_progress(recorded.jobs[number - 1 :]) is None:
            assert time.monotonic() < deadline, f"job {number} does not begin"
            time.sleep(POLL_S)
            recorded.read()
        return recorded.jobs[number - 1].job_id

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*NFDT, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=self._folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def processes(self) -> list[psutil.Process]:
        """The job server and its slots."""
        return [psutil.Process(self._server.process.pid), *descendants(self._server.process.pid)]

    def ports(self) -> list[int]:
        """Ports on which these processes listen: of the service, the page, the job's shards, and the ring's Gloo."""
        return listening(self.processes)

    @property
    def page_port(self) -> int:
        """Port of the page."""
        return int(re.search(r"page: \S+:(\d+)", self._log)[1])

    @property
    def _log(self) -> str:
        return (self._folder / "server.log").read_text()

    @property
    def tracebacks(self) -> list[str]:
        """Exceptions in the server's log, which no message may cause."""
        parts = self._log.split("Traceback (most recent call last)")[1:]
        return [part[:2000] for part in parts]

    def check(self) -> None:
        """Raise unless the job has trained each sample once in each epoch, and the ring and a further job succeed."""
        # Its epochs are slower on a busy machine. If it has ended, a made-up call may have deleted it.
        with suppress(UsageError), closing(JobsClient(self.address, self.token, ca_file=self.ca_file)) as client:
            client.control(self._ring, stop_training=jobs_pb2.StopTraining())
        for script in self._scripts:
            assert script.wait(DEADLINE_S) == 0, script.args
        counts = read_counts(self._counts)
        assert (counts.again, counts.never) == (0, 0), counts
        script = self._folder / "next.py"
        script.write_text(DIGITS + "build().fit(x, y, batch_size=32, epochs=1, verbose=0)")
        self._run("jobs", "attach", self._run("run", "--detach", "--workers", "1", str(script)).split()[-1])


class Shard:
    """A shard in a process of its own, whose key is known, with a worker that pushes honestly."""

    def __init__(self, undo: ExitStack) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SHARD, KEY],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        undo.callback(stop, self._process)
        self.address = self._process.stdout.readline().strip()
        self._good = undo.enter_context(
            closing(StreamClient([self.address], LAYOUT, "good", worker_token(KEY, "good")))
        )
        self._good.pull()

    @property
    def processes(self) -> list[psutil.Process]:
        """The process of the shard."""
        return [psutil.Process(self._process.pid)]

    def ports(self) -> list[int]:
        """Its ports: of the service and of the streams."""
        return listening(self.processes)

    def worker(self, number: int) -> Callable[[Random], int]:
        """Return the attack of a worker with a valid token: frames on one stream after the other, the answered counted.

        Each stream goes on after the last answered request, as others would be duplicates that no shard applies.
        """
        worker, first = f"bad-{number}", 1

        def send_frames(random: Random) -> int:
            nonlocal first
            data = made_up.frames(random, size=4 * LAYOUT.size, worker=worker, count=FRAMES, first=first)
            answers: list[Frame] = []
            with suppress(NfdtError, OSError, EOFError, grpc.RpcError):
                answers = exchange(self.address, worker_token(KEY, worker), [data])
            first = max([first, *(one.sequence + 1 for one in answers if one.kind != ERROR)])
            return len(answers)

        return send_frames

    def check(self) -> None:
        """Raise unless an honest push is applied."""
        assert self._good.push(gradients(1)[0], samples=1).applied
