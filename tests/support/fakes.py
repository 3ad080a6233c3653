"""Fakes of slots, shards and clients: threads that speak the real protocol, without TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import grpc
import numpy as np

from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import NfdtError, ServerUnreachable
from nfdt.core.sharding.records import to_arrays
from nfdt.core.wire import jobs_pb2, jobs_pb2_grpc, shards_pb2, shards_pb2_grpc, workers_pb2, workers_pb2_grpc
from nfdt.core.wire.channel import make_server, open_channel, same_token
from nfdt.core.wire.status import translated
from nfdt.core.work.slot_connection import NextCalls, SlotStream
from nfdt.core.work.tasks import TaskNumbers
from nfdt.model.program.state import dump_state
from nfdt.model.training.merge import decode_arrays, encode_arrays

TOKEN = "secret-token"
DEADLINE_S = 30.0
VERSIONS = {"python": "3.11", "keras": "3.15.1", "tensorflow": "2.21.0"}
LAYOUT = [["kernel", [2, 2]], ["bias", [2]]]
WEIGHTS = np.arange(6, dtype=np.float32)


class FakeShard(shards_pb2_grpc.ShardServicer):
    """Shard that holds its slice of the weights and computes nothing; it has what fake workers have trained."""

    trained: ClassVar[defaultdict[str, TaskNumbers]] = defaultdict(TaskNumbers)  # by job

    def __init__(self, assignment: workers_pb2.ShardAssignment) -> None:
        cut = [slice(0, 6)] if assignment.shards == 1 else [slice(0, 4), slice(4, 6)]
        self.weights = WEIGHTS[cut[assignment.index]].copy()
        self.learning_rate = 0.5
        self.forgotten: list[str] = []
        self.flushes = 0
        self.counts: dict[str, Any] = {}
        self.closed_round = 0
        self._index, self._tasks = assignment.index, self.trained[assignment.job_id]
        self._server, self.address = make_server(
            "127.0.0.1:0", authenticate=lambda method, token: same_token(assignment.job_token, token)
        )
        shards_pb2_grpc.add_ShardServicer_to_server(self, self._server)
        self._server.start()

    def Administer(self, request, context):
        applied = [task for task in request.forget.tasks if task in self._tasks]
        match request.WhichOneof("action"):
            case "flush":
                self.flushes += 1
            case "learning_rate":
                self.learning_rate = request.learning_rate.value
            case "forget":
                self.forgotten.append(request.forget.worker)
        statistics = json.dumps({"workers": self.counts})
        return shards_pb2.AdminReply(version=1, statistics_json=statistics, applied=applied)

    def Read(self, request_iterator, context):
        request = next(request_iterator)
        state = {
            "weights": self.weights,
            "optimizer/0": np.array(7, np.int64),
            f"optimizer/{self._index + 1}": self.weights,
        }
        if request.records:
            mode = {"closed_round": self.closed_round}
            records = to_arrays({"version": 1, "mode": mode, "tasks": self._tasks.to_array()})
            state |= {f"records/{name}": array for name, array in records.items()}
        data = dump_arrays(state)
        half = len(data) // 2
        yield shards_pb2.StateChunk(offset=0, total_bytes=len(data), data=data[:half])
        yield shards_pb2.StateChunk(offset=half, total_bytes=len(data), data=data[half:])

    def Write(self, request_iterator, context):
        self.weights = load_arrays(b"".join(chunk.data for chunk in request_iterator))["weights"].copy()
        return shards_pb2.AdminReply(version=2)

    def stop(self) -> None:
        self._server.stop(None)


class FakeSlot:
    """One slot, registered by a thread of its own.

    Args:
        on_task: Function that a worker calls with (slot, task) for each task; its exception is the slot's failure.
        patience_s: Seconds without an answer until the slot gives up; 0: it ends with its stream.
        hello: Further fields of its hello.
        serves: Whether a shard becomes ready; otherwise it only takes its assignment.
        decide: Returns the decision of the job's callbacks for a request to summarise.
    """

    def __init__(
        self,
        address: str,
        role: str,
        name: str,
        *,
        on_task: Callable[[FakeSlot, Any], None] = lambda slot, task: None,
        versions: dict[str, str] = VERSIONS,
        token: str = TOKEN,
        patience_s: float = 0.0,
        hello: Mapping[str, Any] = MappingProxyType({}),
        serves: bool = True,
        decide: Callable[[Any], dict[str, Any] | None] = lambda summarise: None,
    ) -> None:
        self.name, self.role = name, role
        self.asked = 0
        self.assignments: list[Any] = []
        self.trained: list[int] = []
        self.batches: list[bytes] = []
        self.shard: FakeShard | None = None
        self.assigned = threading.Event()
        self.dismissed = threading.Event()
        self.released = threading.Event()
        self._on_task, self._serves, self.decide = on_task, serves, decide
        self._patience_s = patience_s
        self._channel = open_channel(address, token)
        self._stub = workers_pb2_grpc.WorkersStub(self._channel)
        identity = {"name": name, "host": socket.gethostname(), "pid": os.getpid(), "role": role, "versions": versions}
        greeting = workers_pb2.SlotHello(**{**identity, **hello})
        if patience_s:
            greeting.key, greeting.patience_s = secrets.token_hex(8), patience_s
        self._stream = SlotStream(self._stub, greeting, address)
        self._threads = [threading.Thread(target=self._attend, daemon=True)]
        self._threads[0].start()

    def die(self) -> None:
        """End like a killed process: the stream breaks."""
        if self.shard:
            self.shard.stop()
        self._channel.close()  # first: it does not leave in order
        self._stream.close()
        self.released.set()  # last: a call that a patient slot repeats ends with its thread

    def drain(self) -> None:
        """Announce the end of the process."""
        self._send(draining=workers_pb2.SlotDraining(grace_s=DEADLINE_S))

    def close(self) -> None:
        self.die()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _attend(self) -> None:
        with contextlib.suppress(grpc.RpcError, NfdtError):
            for assignment in self._stream.assignments():
                kind = assignment.WhichOneof("assignment")
                self.assignments.append(getattr(assignment, kind))
                self.assigned.set()
                if kind == "move_shards":
                    continue  # the answer to the next request moves it
                if kind == "shard":
                    self.released.clear()
                    self._serve(assignment.shard)
                elif kind == "worker":
                    self.released.clear()
                    thread = threading.Thread(target=self._work, args=(assignment.worker,), daemon=True)
                    self._threads.append(thread)
                    thread.start()
                elif kind == "release":
                    self.released.set()
                    if self.shard:
                        self.shard.stop()
                        self.shard = None
                        self._send(finished=workers_pb2.SlotFinished(job_id=assignment.release.job_id))
                else:
                    self.dismissed.set()
                    self._stream.close()
                    return

    def _send(self, **message: Any) -> None:
        self._stream.send(**message)

    def _serve(self, assignment: workers_pb2.ShardAssignment) -> None:
        if not self._serves:
            return
        if self.shard:
            self.shard.stop()
        self.shard = FakeShard(assignment)
        place = {"address": self.shard.address, "incarnation": assignment.incarnation}
        self._send(ready=workers_pb2.SlotReady(job_id=assignment.job_id, **place))

    def _work(self, assignment: workers_pb2.WorkerAssignment) -> None:
        try:
            self._loop(assignment)
        except grpc.RpcError:
            return  # killed
        except Exception as error:
            if self._patience_s and isinstance(error, ServerUnreachable):
                return  # also killed
            failed = workers_pb2.SlotFailed(
                job_id=assignment.job_id,
                exception_module=type(error).__module__,
                exception_type=type(error).__qualname__,
                message=str(error),
                traceback="Traceback: in train_step",
            )
            return self._send(failed=failed)
        self._send(finished=workers_pb2.SlotFinished(job_id=assignment.job_id))

    def _loop(self, assignment: workers_pb2.WorkerAssignment) -> None:
        answer = workers_pb2.NextRequest()
        questions = NextCalls(
            self._stub, (assignment.job_id, assignment.job_token), "the server", self._patience_s, self.released
        )
        self.metrics, self.state, steps, samples = [0.0], [np.zeros(1, np.float32)], 0, 0
        incarnation = assignment.incarnation
        while not self.released.is_set():
            answer.job_id, answer.worker, answer.wait_s = assignment.job_id, assignment.worker, 5.0
            answer.job_token, answer.incarnation = assignment.job_token, incarnation
            answer.statistics_json = json.dumps({"samples": samples, "steps": len(self.trained)})
            self.asked += 1
            reply = questions.ask(answer) if self._patience_s else self._stub.Next(answer, timeout=DEADLINE_S)
            kind = reply.WhichOneof("instruction")
            instruction = getattr(reply, kind)
            answer = workers_pb2.NextRequest()
            if kind == "begin_epoch":
                steps, epoch = 0, instruction.epoch
                if instruction.untrained:
                    self.state = [a.copy() for a in decode_arrays(instruction.untrained)]
            elif kind == "work":
                answer.epoch, answer.logs["loss"] = epoch, 1.0 / (1 + len(self.trained))
                if instruction.untrained:
                    self.state = [a.copy() for a in decode_arrays(instruction.untrained)]
                for task in instruction.tasks:
                    self._on_task(self, task)
                    self.trained.append(task.task)
                    FakeShard.trained[assignment.job_id].add(task.task)
                    self.batches.append(task.data)
                    steps += 1
                    samples += task.stop - task.start
                    self.state[0] = self.state[0] + 1
                    answer.finished.add(task=task.task, samples=task.stop - task.start)
            elif kind == "collect_state":
                answer.epoch_state.CopyFrom(
                    workers_pb2.EpochState(
                        epoch=instruction.epoch,
                        steps=steps,
                        untrained=encode_arrays(self.state),
                        metrics=dump_arrays({"sum/0": np.array([steps], np.float32)}),
                    )
                )
            elif kind == "evaluate":
                answer.evaluated.CopyFrom(
                    workers_pb2.Evaluated(
                        epoch=instruction.epoch,
                        tasks=[t.task for t in instruction.tasks],
                        metrics=dump_arrays(
                            {"sum/0": np.array([sum(t.stop - t.start for t in instruction.tasks)], np.float32)}
                        ),
                    )
                )
            elif kind == "summarise":
                logs = {"steps": float(load_arrays(instruction.metrics)["sum/0"][0])}
                validation = instruction.validation_metrics
                val_logs = {"rows": float(load_arrays(validation)["sum/0"][0])} if validation else None
                decision = self.decide(instruction) if instruction.callbacks else None
                answer.summary_json = json.dumps({"logs": logs, "val_logs": val_logs, "decision": decision})
            elif kind == "move_shards":
                incarnation = instruction.incarnation
            elif kind == "leave":
                return


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Client:
    """Calls of a user's script, each with a deadline."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.address = address
        self._channel = open_channel(address, token)
        self.stub: Any = jobs_pb2_grpc.JobsStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def call(self, method: str, request: Any) -> Any:
        with translated(self.address):
            return getattr(self.stub, method)(request, timeout=DEADLINE_S)

    def upload(self, data: bytes, piece: int = 1000) -> str:
        name = sha(data)
        chunks = [
            jobs_pb2.Chunk(sha256=name, total_bytes=len(data), offset=i, data=data[i : i + piece])
            for i in range(0, len(data), piece)
        ]
        assert self.call("Upload", iter(chunks)).total_bytes == len(data)
        return name

    def download(self, name: str) -> bytes:
        with translated(self.address):
            chunks = self.stub.Download(jobs_pb2.DownloadRequest(sha256=name), timeout=DEADLINE_S)
            return b"".join(chunk.data for chunk in chunks)

    def program(self, **changes: Any) -> dict[str, Any]:
        """Upload a small program and return the fields of a specification that name it."""
        state = self.upload(dump_state(WEIGHTS, {0: np.array(0, np.int64)}, {0: np.zeros(1, np.float32)}))
        variables = [{"shape": [], "dtype": "int64", "variable": -1}]
        variables += [{"shape": shape, "dtype": "float32", "variable": i} for i, (_, shape) in enumerate(LAYOUT)]
        manifest = {
            "kind": "config",
            "layout": LAYOUT,
            "untrained": [{"path": "counter", "shape": [1], "dtype": "float32", "rule": "max"}],
            "optimizer": {"config": {}},
            "optimizer_variables": variables,
            "elementwise": True,
            "state": state,
            "code": None,
            **changes,
        }
        program = self.upload(json.dumps(manifest).encode())
        return {"program": program, "artifacts": [program, state]}

    def spec(self, *, epochs: int = 2, workers: int = 2, samples: int = 40, **changes: Any) -> dict[str, Any]:
        data = self.upload(b"rows")
        spec = {
            **(self.program() if "program" not in changes else {}),
            "algorithm": {"name": "asgd", "update_rule": "plain"},
            "cluster": {"workers": workers},
            "fit": {"epochs": epochs, "batch_size": 4},
            "train": {"kind": "arrays", "structure": 0, "arrays": [data], "samples": samples},
            "attended": False,
            "versions": VERSIONS,
        }
        return {**spec, **changes}

    def submit(self, spec: dict[str, Any] | None = None, session: str = "s") -> str:
        request = jobs_pb2.SubmitRequest(spec_json=json.dumps(spec or self.spec()), session=session)
        return self.call("Submit", request).job_id

    def watch(self, job_id: str, after: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        with translated(self.address):
            for event in self.stub.Watch(jobs_pb2.WatchRequest(job_id=job_id, after=after), timeout=DEADLINE_S):
                yield event.kind, json.loads(event.data_json)

    def until(self, job_id: str, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the first event of a kind with these fields."""
        for found, data in self.watch(job_id):
            if found == kind and all(data.get(k) == v for k, v in fields.items()):
                return data
        raise AssertionError(f"job {job_id} ended without {kind} {fields}")

    def finish(self, job_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Wait for the end of a job and return its events."""
        return list(self.watch(job_id))

    def control(self, job_id: str, **action: Any) -> None:
        self.call("Control", jobs_pb2.ControlRequest(job_id=job_id, **action))

    def show(self, job_id: str) -> Any:
        return self.call("Show", jobs_pb2.JobRef(job_id=job_id))


def of(events: list[tuple[str, dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    return [data for found, data in events if found == kind]
