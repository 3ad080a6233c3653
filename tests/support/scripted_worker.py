"""Worker whose instructions are a script; its model is ``w * x`` with a squared error.

Gradients and losses therefore reveal the weight that they were computed on.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hashlib
import io
import threading
from collections.abc import Callable

import keras
import numpy as np

from nfdt.core.arrays.pytree import flatten_structure
from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.patience import Patience
from nfdt.model.program.pack import pack
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.movable_client import MovableClient, ShardMoves
from nfdt.worker.worker import Worker

CODED = 0.25  # change of the weights by a codec


class Shards:
    """Client whose weights rise by one with every push, also with those of other workers."""

    codecs: dict = {}
    bytes_sent = bytes_received = 0

    def __init__(self, size):
        self.size, self.version = size, 0
        self.pulls, self.pushes, self.unanswered = 0, [], 0

    @property
    def _weights(self):
        return np.full(self.size, self.version, np.float32)

    def pull(self, min_version=0, *, exact=True, kept=False):
        assert not self.unanswered, "a pull while pushes are unanswered"
        self.pulls += 1
        return Pulled(self._weights + (0 if exact else CODED), (self.version,))

    def begin_push(self, gradient, **options):
        self.pushes.append((np.array(gradient), options))
        self.version += 1
        self.unanswered += 1
        weights = self._weights if options["want_weights"] else None
        return Answer(self, Pushed(weights, (self.version,), 0, True))


class Answer:
    """Answer that has arrived."""

    arrived = True

    def __init__(self, shards, pushed):
        self.shards, self.pushed = shards, pushed

    def result(self):
        self.shards.unanswered -= 1
        return self.pushed


class Job:
    """A worker, its shards and its instructions; ``moved``: number of updates of others before an instruction."""

    def __init__(self, x, y=None, *, algorithm="ssp", shards=1, batch_size=1, timeout_s=600.0, **overrides):
        y = np.zeros((len(x), 1), np.float32) if y is None else y
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        packed = pack(model, (x[:1], y[:1]))
        self.blobs = dict(packed.artifacts)
        structure, arrays = flatten_structure((x, y))
        names = [self._put(npy_bytes(array)) for array in arrays]
        self.arrays = dict(zip(names, arrays, strict=True))
        data = DataSpec(kind="arrays", structure=structure, arrays=tuple(names), samples=len(x))
        self.spec = JobSpec(
            program=self._put(packed.manifest.to_bytes()),
            algorithm=resolve_algorithm(algorithm, **overrides),
            cluster=ClusterSpec(workers=1, shards=shards),
            fit=FitSpec(epochs=1, batch_size=batch_size, shuffle=False),
            train=data,
            validation=data,
            step_timeout_s=timeout_s,
        )
        self.manifest = packed.manifest
        self.shards = Shards(self.manifest.layout.size)
        self.moves, self.stopped, self.ending = ShardMoves(), threading.Event(), threading.Event()
        self.moves.announce(move(0))

    def connect(self, place):
        return self.shards

    def _put(self, content):
        name = hashlib.sha256(content).hexdigest()
        self.blobs[name] = content
        return name

    def run(self, *actions: pb.NextReply | Callable[[], None]) -> list[pb.NextRequest]:
        """Send the worker these instructions and call the functions among them; return a report per instruction."""
        reports, script = [], list(actions)

        def ask(request):
            reports.append(pb.NextRequest.FromString(request.SerializeToString()))
            if request.busy:
                return pb.NextReply(wait=pb.Wait())
            while script and not isinstance(script[0], pb.NextReply):
                script.pop(0)()
            return script.pop(0) if script else pb.NextReply(leave=pb.Leave(reason="done"))

        Worker(
            self.spec,
            "worker-0",
            0,
            self.manifest,
            read=self.blobs.__getitem__,
            open_array=self.arrays.__getitem__,
            client=MovableClient(self.moves, self.connect, lambda: Patience(0.0, self.stopped)),
            ask=ask,
            stopped=self.stopped,
            ending=self.ending,
        ).run()
        return reports[1:]

    def others_push(self):
        self.shards.version += 10

    def begin(self, epoch=0, crc=0):
        return pb.NextReply(begin_epoch=pb.BeginEpoch(epoch=epoch, order_crc=crc))

    @property
    def computed_on(self):
        """Return the weight that each gradient was computed on: d/dw (w x)^2 = 2 w for x = 1."""
        return [float(gradient[0]) / 2 for gradient, _ in self.shards.pushes]


def npy_bytes(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def move(incarnation, *addresses, token=""):
    """Return the announcement of shards."""
    return ins.MoveShards("job", incarnation, addresses, token)


def work(task, stop=None, **options):
    return pb.NextReply(work=pb.Work(tasks=[pb.Task(task=task, start=0, stop=stop or 1, parts=1)], **options))


def evaluate(epoch=0, tasks=1):
    rows = [pb.Task(task=i, start=i, stop=i + 1) for i in range(tasks)]
    return pb.NextReply(evaluate=pb.Evaluate(epoch=epoch, tasks=rows))


def loss_of(report):
    """Return the loss from the metric variables (sum, count)."""
    metrics = load_arrays(report.evaluated.metrics)
    total, count = float(metrics["sum/0"]), float(metrics["sum/1"])
    return total / count
