"""A group's side of the parameter server: rank 0 pushes for all and pulls for all.

No other file of hfdt uses the shards of NFDT.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hfdt.runtime.communicator import Communicator
from hfdt.runtime.step import GRADIENT, AllreduceStep
from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.state import State
from nfdt.core.specs.job import JobSpec
from nfdt.core.training.gradient_step import GradientStep
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import is_loopback, split_address
from nfdt.core.work.statistics import PushOutcomes
from nfdt.core.work.tasks import Task
from nfdt.transport.base import ParameterClient, Pulled, Pushed
from nfdt.transport.choice import make_choice
from nfdt.transport.emulated_link import make_link
from nfdt.transport.stream import StreamClient

Pause = Callable[[float], None]
Connect = Callable[[ParameterLayout], ParameterClient]
PLAIN = Task(task=0, start=0, stop=0)  # of no synchronous round


def connect(
    assignment: pb.WorkerAssignment,
    layout: ParameterLayout,
    *,
    spec: JobSpec,
    number: int,
    stopped: threading.Event,
    ca_file: str | None,
) -> ParameterClient:
    """A client of the job's shards for rank 0 of a group.

    Args:
        assignment: Addresses of the shards.
        layout: Layout of the model.
        spec: The job.
        number: Number of rank 0 among the job's workers; selects its emulated link.
        stopped: Set when the job is over.
        ca_file: Certificates to trust, where shards speak TLS.
    """
    addresses: Sequence[str] = list(assignment.shards)
    local = all(is_loopback(split_address(address)[0]) for address in addresses)
    return StreamClient(
        addresses,
        layout,
        assignment.worker,
        assignment.job_token,
        timeout_s=spec.step_timeout_s,
        choice=make_choice(spec.algorithm, layout.size),
        emulated=make_link(spec.cluster.emulate, number, stopped),
        ca_file=None if local else ca_file,
    )


class GroupExchange:
    """The shards' weights on all ranks, and the pushes of rank 0. Methods are collective where documented.

    Args:
        communicator: The group.
        client: Client of rank 0; None on the others.
        size: Elements of the weights, P.
        first_update: The optimizer's ``iterations`` at the start of the job.
        shards: Number of shards of the job.

    Attributes:
        weights: Flat, shape ``(P,)``, float32, as this group received them last; None: they have to be pulled.
        version: Updates that ``optimizer.iterations`` shows with them.
        wants_weights: Whether the answers to pushes shall hold weights.
    """

    def __init__(
        self, communicator: Communicator, client: ParameterClient | None, size: int, first_update: int, shards: int
    ) -> None:
        self._communicator, self._client, self._size = communicator, client, size
        self._first, self._shards = first_update, shards
        self.weights: Array | None = None
        self.version = first_update
        self.wants_weights = True
        self.counts = PushOutcomes()

    def pull(self) -> Array:
        """The weights as they are, on every rank; collective."""
        began = time.perf_counter()
        pulled = self._client.pull() if self._client else None
        weights = self._spread(pulled)
        self.counts.exchange_s += time.perf_counter() - began
        return weights

    def held(self) -> Array:
        """The weights to compute on; collective where they have to be pulled."""
        return self.pull() if self.weights is None else self.weights

    def forget(self) -> None:
        """The weights have changed meanwhile: pull them before the next step."""
        self.weights = None

    def push(self, vector: Array, samples: int, rate: float, task: Task) -> None:
        """Apply the group's vector, which rank 0 pushes, and receive weights in return; collective.

        Args:
            vector: Vector to push, equal on all ranks, shape ``(P,)``, float32.
            samples: Number of samples behind the vector.
            rate: Multiplies the learning rate.
            task: Position in a synchronous round, whose weights come with the next round.
        """
        began = time.perf_counter()
        pushed = self._push(vector, samples, rate, task) if self._client else None
        if self._is_answered(task):
            self._spread(pushed)
        else:
            self.weights = None
        self.counts.exchange_s += time.perf_counter() - began

    def _is_answered(self, task: Task) -> bool:
        """Whether the answer to the task's push holds weights; else they are pulled before the next step."""
        return self.wants_weights and task.parts <= 1

    def _push(self, vector: Array, samples: int, rate: float, task: Task) -> Pushed:
        assert self._client is not None
        # A gradient that is not finite is pushed as well: the shards, all of them, drop it and close its round.
        if self._shards > 1 and not np.isfinite(vector).all():
            vector = np.full_like(vector, np.nan)
        numbers = {"round": task.round, "part": task.part, "parts": max(task.parts, 1)}
        answered = self._is_answered(task)
        pushed = self._client.push(vector, samples=samples, rate=rate, want_weights=answered, **numbers)
        self.counts.staleness[pushed.staleness] += 1
        self.counts.batch_sizes[samples] += 1
        self.counts.dropped += not pushed.applied
        return pushed

    def _spread(self, answer: Pulled | Pushed | None) -> Array:
        """Rank 0's answer on every rank."""
        if answer is None:
            weights, version = self._communicator.receive_vector(self._size)
        else:
            assert answer.weights is not None
            weights, version = self._communicator.send_vector(answer.weights, self._first + answer.versions[0])
        self.weights, self.version = weights, version
        return weights

    @property
    def bytes_sent(self) -> int:
        """Bytes that rank 0 sent."""
        return self._client.bytes_sent if self._client else 0

    @property
    def bytes_received(self) -> int:
        """Bytes that rank 0 received."""
        return self._client.bytes_received if self._client else 0

    @property
    def codecs(self) -> dict[str, Any]:
        """Codecs in use, where they are chosen while the job runs."""
        return dict(self._client.codecs) if self._client else {}

    def close(self) -> None:
        """Disconnect."""
        if self._client:
            self._client.close()


class GradientOuter:
    """A step of the group is one gradient of its whole batch, pushed to the shards.

    Args:
        model: A compiled, built model; its optimizer is replaced by one that records.
        manifest: Program of the model.
        state: State at the start of the job.
        communicator: The group.
        exchange: Exchange with the shards.
    """

    def __init__(
        self, model: Any, manifest: Manifest, state: State, communicator: Communicator, exchange: GroupExchange
    ) -> None:
        self.layout = manifest.layout
        self._start = np.asarray(state.weights, np.float32)
        self._compute = GradientStep(model, self.layout, loss_scale=manifest.loss_scale)
        self._exchange = exchange
        flat = tf.TensorSpec([self.layout.size], tf.float32)
        self._reduce: Any = tf.function(lambda gradient: communicator.sum(gradient, GRADIENT), input_signature=[flat])

    def probe(self, batch: Any) -> None:
        """Compute a gradient and forget it."""
        np.asarray(self._compute(self._start, batch, version=0).gradient[:1])

    def __call__(
        self, batch: Any, weight: float, pause: Pause, *, samples: int, rate: float, task: Task
    ) -> Mapping[str, Any]:
        """Train on this rank's part of a batch of the group; collective, like ``AllreduceStep``."""
        weights = self._exchange.held()
        gradient, logs = tf.zeros([self.layout.size]), {}
        if batch is not None:
            began = time.perf_counter()
            result = self._compute(weights, batch, version=self._exchange.version)
            gradient, logs = result.gradient, result.logs
            pause(time.perf_counter() - began)
        mean = np.asarray(self._reduce(gradient * weight))
        self._exchange.push(mean, samples, rate, task)
        return logs

    def settle(self) -> None:
        """Nothing is held back."""


class DeltaOuter:
    """Steps of the group move its own weights by the user's optimizer; what they changed is pushed every few steps.

    The difference ``pulled - own`` takes the place of a gradient on the shards, whose optimizer is an outer one.

    Args:
        model: A compiled, built model.
        manifest: Program of the model.
        state: State at the start of the job, with the members' optimizer.
        communicator: The group.
        exchange: Exchange with the shards.

    Attributes:
        local_steps: Steps between two pushes.
    """

    def __init__(
        self, model: Any, manifest: Manifest, state: State, communicator: Communicator, exchange: GroupExchange
    ) -> None:
        self.step = AllreduceStep(model, manifest, state, communicator.sum)
        self.layout = self.step.layout
        self._exchange = exchange
        self.local_steps = 1
        self._steps = self._samples = 0
        self._rate = 1.0

    def probe(self, batch: Any) -> None:
        """Compute a gradient and forget it."""
        self.step.probe(batch)

    def __call__(
        self, batch: Any, weight: float, pause: Pause, *, samples: int, rate: float, task: Task
    ) -> Mapping[str, Any]:
        """Train on this rank's part of a batch of the group; collective, like ``AllreduceStep``."""
        if self._exchange.weights is None:
            self.step.load(State(self._exchange.pull(), optimizer={}))
        logs = self.step(batch, weight, pause)
        self._steps += 1
        self._samples += samples
        self._rate = rate
        if self._steps >= self.local_steps:
            self.settle()
        return logs

    def settle(self) -> None:
        """Push what the steps since the last push have changed; collective. Nothing without such steps."""
        if not self._steps:
            return
        pulled = self._exchange.held()
        self._exchange.push(pulled - self.step.weights(), self._samples, self._rate, PLAIN)
        self._steps = self._samples = 0
        self.step.load(State(self._exchange.held(), optimizer={}))
