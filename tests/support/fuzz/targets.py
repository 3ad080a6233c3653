"""Targets of made-up traffic: real processes, and the check that they still do their work."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random

import grpc
import psutil
from google.protobuf.descriptor import MethodDescriptor

from nfdt.core.errors import NfdtError
from nfdt.core.wire import jobs_pb2, shards_pb2, workers_pb2
from nfdt.core.wire.job_token import worker_token
from nfdt.transport.stream import StreamClient
from tests.support.fuzz import made_up
from tests.support.raw_stream import exchange
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, descendants, environment, start_server, stop
from tests.support.shard_cluster import LAYOUT, gradients

CALL_S = 0.1  # limit of a call: some of them stream until the job ends
SILENCE_S = 0.2
KEY = "key-of-a-job"
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


def send(port: int, data: bytes) -> None:
    """Send bytes on a new connection and read until the other side ends it or is silent."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), SILENCE_S) as one:
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


class JobServer:
    """Job server with a worker; a job trains while the traffic arrives.

    Attributes:
        processes: Job server and its slots.
    """

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self._folder = folder
        self._server = start_server(folder, "--workers", "2")
        undo.callback(stop, self._server.process)
        self.token = self._server.token_file.read_text()
        self.address = self._server.address
        self._job = self._submit(epochs=100_000)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*NFDT, *words],
            env=environment(**self._server.env()),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=self._folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _submit(self, epochs: int) -> str:
        script = self._folder / f"script{epochs}.py"
        script.write_text(DIGITS + f"build().fit(x, y, batch_size=32, epochs={epochs}, verbose=0)")
        return self._run("run", "--detach", "--workers", "1", str(script)).split()[-1]

    @property
    def processes(self) -> list[psutil.Process]:
        """The job server and its slots."""
        return [psutil.Process(self._server.process.pid), *descendants(self._server.process.pid)]

    def ports(self) -> list[int]:
        """Ports on which these processes listen."""
        found = (each for process in self.processes for each in process.net_connections("tcp"))
        return sorted({one.laddr.port for one in found if one.status == psutil.CONN_LISTEN})

    @property
    def tracebacks(self) -> list[str]:
        """Exceptions in the server's log, which no message may cause."""
        parts = (self._folder / "server.log").read_text().split("Traceback (most recent call last)")[1:]
        return [part[:2000] for part in parts]

    def check(self) -> None:
        """Raise unless the job still trains, and another one succeeds after its end."""
        found = {one["job_id"]: one for one in json.loads(self._run("jobs", "list", "--format", "json"))}
        assert found[self._job]["state"] == "running", found[self._job]
        self._run("jobs", "cancel", self._job)
        self._run("jobs", "attach", self._submit(epochs=1))


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

    def send(self, random: Random, count: int) -> int:
        """Send frames on a stream of a valid worker; return their number."""
        data = made_up.frames(random, size=4 * LAYOUT.size, count=count)
        with suppress(NfdtError, OSError, EOFError, grpc.RpcError):
            exchange(self.address, worker_token(KEY, "bad"), [data])
        return count

    def check(self) -> None:
        """Raise unless an honest push is applied."""
        assert self._good.push(gradients(1)[0], samples=1).applied
