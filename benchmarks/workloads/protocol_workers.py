"""Workers that only speak the protocol: many in one process, each with a connection of its own, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from nfdt.core.arrays.safetensors_io import dump_arrays
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.model.training.merge import encode_arrays

OPTIONS = (  # those of a real worker's channel
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 6000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
WAIT_S = 20.0
TIMEOUT_S = 120.0
RETRY_S = 0.5
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)  # of connections
AT_ONCE = 12  # workers of a process that connect together: a server takes few strangers from one address
SUMMARY = '{"logs": {"loss": 1.0}, "val_logs": null, "decision": null}'


@dataclass
class Counts:
    """What the workers of one process have done so far.

    Attributes:
        attending: Workers that the server has welcomed.
        calls: Answers to Next other than Wait.
        tasks: Tasks that were leased and reported.
        longest_s: Longest time from a report of tasks to an instruction.
        failures: Errors, as text.
    """

    attending: int = 0
    calls: int = 0
    tasks: int = 0
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class ProtocolWorker:
    """One worker.

    Args:
        number: Its number; each worker of a server has another one.
        address: Address of the server.
        token: Token of the server.
        versions: Versions of packages that it reports.
        step_s: Seconds that it claims for each step; it takes none.
        counts: Counts of all workers of this process.
        connecting: Limits the workers that connect at the same time.
    """

    def __init__(
        self,
        number: int,
        address: str,
        token: str,
        versions: dict[str, str],
        step_s: float,
        counts: Counts,
        connecting: asyncio.Semaphore,
    ) -> None:
        self._connecting = connecting
        self._number, self._versions, self._step_s, self._counts = number, versions, step_s, counts
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        self._stub: Any = workers_pb2_grpc.WorkersStub(self._channel)
        self._to_send: asyncio.Queue[pb.SlotMessage] = asyncio.Queue()
        self._every_s, self._sent, self._received = 2.0, 0, 0
        self._training: asyncio.Task[None] | None = None
        self._known = False

    async def run(self) -> None:
        """Attend until the server ends the stream; a connection that fails is opened again."""
        try:
            while not await self._attends():
                await asyncio.sleep(RETRY_S)
        finally:
            await self._channel.close(None)

    async def _attends(self) -> bool:
        """Attend once; return whether the server has ended the stream."""
        try:
            async with self._connecting:
                stream = self._stub.Attend(self._messages(), metadata=self._metadata)
                welcome = await stream.read()
            self._counts.attending += welcome is not EOF and not self._known
            self._known = True
            while (assignment := await stream.read()) is not EOF:
                self._received = assignment.number or self._received
                kind = assignment.WhichOneof("assignment")
                if kind == "heartbeat":
                    self._every_s = assignment.heartbeat.every_s or self._every_s
                elif kind == "worker":
                    self._training = asyncio.create_task(self._train(assignment.worker))
                elif kind == "dismiss":
                    break
        except grpc.aio.AioRpcError as error:
            if error.code() not in BROKEN:
                self._counts.failures.append(f"Attend: {error.code().name} {error.details()}")
            return False
        return True

    async def _messages(self) -> AsyncIterator[pb.SlotMessage]:
        n = self._number
        yield pb.SlotMessage(
            received=self._received,
            hello=pb.SlotHello(
                name=f"protocol-{n}",
                host=f"host-{n // 8}",
                pid=n + 1,
                role="worker",
                versions=self._versions,
                device="cpu",
                boot_id=f"boot-{n // 8}",
                key=f"key-{n}",
                patience_s=60.0,
            ),
        )
        while True:
            try:
                message = await asyncio.wait_for(self._to_send.get(), self._every_s)
                self._sent += 1
                message.number = self._sent
            except TimeoutError:
                message = pb.SlotMessage(heartbeat=pb.SlotHeartbeat())
            message.received = self._received
            yield message

    async def _train(self, work: pb.WorkerAssignment) -> None:
        request, call, loop = pb.NextRequest(), 0, asyncio.get_running_loop()
        while True:
            call += 1
            request.job_id, request.worker, request.job_token = work.job_id, work.worker, work.job_token
            request.call, request.wait_s, began = call, WAIT_S, loop.time()
            try:
                reply = await self._stub.Next(request, metadata=self._metadata, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in BROKEN:
                    self._counts.failures.append(f"Next: {error.code().name} {error.details()}")
                    return
                call -= 1  # it is repeated
                await asyncio.sleep(RETRY_S)
                continue
            kind = reply.WhichOneof("instruction")
            if kind != "wait":
                self._counts.calls += 1
                if request.finished:
                    self._counts.longest_s = max(self._counts.longest_s, loop.time() - began)
            request = self._report(reply, kind)
            if kind == "leave":
                await self._to_send.put(pb.SlotMessage(finished=pb.SlotFinished(job_id=work.job_id)))
                return

    def _report(self, reply: pb.NextReply, kind: str) -> pb.NextRequest:
        request = pb.NextRequest()
        if kind == "work":
            request.epoch, request.logs["loss"] = reply.work.epoch, 1.0
            for task in reply.work.tasks:
                samples = task.stop - task.start
                request.finished.add(task=task.task, samples=samples, compute_s=self._step_s)
            self._counts.tasks += len(reply.work.tasks)
        elif kind == "collect_state":
            state = encode_arrays([np.zeros(1, np.float32)])
            metrics = dump_arrays({"sum/0": np.ones(1, np.float32)})
            epoch = reply.collect_state.epoch
            request.epoch_state.CopyFrom(pb.EpochState(epoch=epoch, steps=1, untrained=state, metrics=metrics))
        elif kind == "summarise":
            request.summary_json = SUMMARY
        return request


def attend(pipe: Connection, address: str, token: str, numbers: range, versions: dict[str, str], step_s: float) -> None:
    """Run workers in this process until it is terminated; answer each message with their :class:`Counts`."""
    asyncio.run(_attend(pipe, address, token, numbers, versions, step_s))


async def _attend(
    pipe: Connection, address: str, token: str, numbers: range, versions: dict[str, str], step_s: float
) -> None:
    counts, loop = Counts(), asyncio.get_running_loop()

    def answer() -> None:
        pipe.recv()
        pipe.send(counts)

    loop.add_reader(pipe.fileno(), answer)
    more = address, token, versions, step_s, counts, asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(ProtocolWorker(number, *more).run() for number in numbers))
    await loop.create_future()
