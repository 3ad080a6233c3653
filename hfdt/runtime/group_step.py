"""Steps of a group, and their exchange with the shards of NFDT: rank 0 pushes and pulls for all ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hfdt.runtime.communicator import Communicator
from hfdt.runtime.shared_denominator import SharedDenominator
from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.statistics import PushOutcomes
from nfdt.core.work.tasks import Task
from nfdt.model.backends.contract import PreparedBatch, current
from nfdt.model.backends.denominator import SUM
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.transport.base import ParameterClient, Pulled, Pushed, PushOptions
from nfdt.transport.stream import shard_connector

Pause = Callable[[float], None]


def connect(
    assignment: pb.WorkerAssignment,
    layout: ParameterLayout,
    *,
    spec: JobSpec,
    number: int,
    stopped: threading.Event,
    insecure: bool,
) -> ParameterClient:
    """Return a client of the job's shards for rank 0 of a group.

    Args:
        assignment: Addresses of the shards, and the authority of their certificates.
        layout: Layout of the model.
        spec: The job.
        number: Number of rank 0 among the job's workers; selects its emulated link.
        stopped: Set when the job is over.
        insecure: Whether shards may be reached in plain text.
    """
    connect_to = shard_connector(spec, layout, assignment.worker, number, stopped)
    tls = {"ca_file": assignment.shard_ca or None, "insecure": insecure}
    return connect_to(list(assignment.shards), token=assignment.shard_token, **tls)


class GroupExchange:
    """Exchange of gradients and weights between the shards and all ranks, through rank 0.

    Methods are collective where documented.

    Args:
        communicator: The group.
        size: Number of weights, P.
        first_update: The optimizer's ``iterations`` at the start of the job.
        shards: Number of shards of the job.

    Attributes:
        client: Client of the shards, which rank 0 sets before the first exchange; None on the others.
        weights: Flat, shape ``(P,)``, float32, as last received by this group; None: they must be pulled.
        version: Value of ``optimizer.iterations`` for these weights.
        wants_weights: Whether the replies to pushes should contain weights.
    """

    def __init__(self, communicator: Communicator, size: int, first_update: int, shards: int) -> None:
        self._communicator, self._size, self._first, self._shards = communicator, size, first_update, shards
        self.client: ParameterClient | None = None
        self.weights: Array | None = None
        self.version = first_update
        self.wants_weights = True
        self.counts = PushOutcomes()

    def pull(self) -> Array:
        """Return the current weights on every rank; collective."""
        began = time.perf_counter()
        pulled = self.client.pull() if self.client else None
        weights = self._spread(pulled)
        self.counts.exchange_s += time.perf_counter() - began
        return weights

    def current_weights(self) -> Array:
        """Return the weights to compute on; collective if they must be pulled."""
        return self.pull() if self.weights is None else self.weights

    def push(self, gradient: Array, samples: int, rate: float, task: Task, denominator: float) -> None:
        """Apply the group's gradient, which rank 0 pushes, and receive new weights; collective.

        Args:
            gradient: Equal on all ranks, shape ``(P,)``, float32.
            samples: Number of its samples.
            rate: Factor on the learning rate.
            task: Its task; the weights of a part of a synchronous round come with the next round.
            denominator: Its denominator, as in ``PushOptions``.
        """
        began = time.perf_counter()
        pushed = self._push(gradient, samples, rate, task, denominator) if self.client else None
        if self._is_answered(task):
            self._spread(pushed)
        else:
            self.weights = None
        self.counts.exchange_s += time.perf_counter() - began

    def _is_answered(self, task: Task) -> bool:
        """Return whether the reply to the task's push contains weights; else they are pulled before the next step."""
        return self.wants_weights and task.parts <= 1

    def _push(self, gradient: Array, samples: int, rate: float, task: Task, denominator: float) -> Pushed:
        assert self.client is not None
        # A non-finite gradient is also pushed: all of the shards drop it and close its round.
        if self._shards > 1 and not np.isfinite(gradient).all():
            gradient = np.full_like(gradient, np.nan)
        options: PushOptions = {"round": task.round, "part": task.part, "parts": max(task.parts, 1), "samples": samples}
        options |= {"tasks": [task.task], "tickets": task.ticket}
        # The rate travels apart from the gradient: an optimizer like Adam would take a factor out of it again.
        options |= {"rate": rate, "denominator": denominator, "want_weights": self._is_answered(task)}
        pushed = self.client.push(gradient, **options)
        self.counts.staleness[pushed.staleness] += 1
        self.counts.batch_sizes[samples] += 1
        self.counts.dropped += not pushed.applied
        return pushed

    def _spread(self, answer: Pulled | Pushed | None) -> Array:
        """Return rank 0's reply on every rank."""
        sent = (answer.weights, self._first + answer.versions[0]) if answer is not None else ()
        weights, self.version = self._communicator.broadcast_vector(self._size, *sent)
        self.weights = weights
        return weights


class GroupStep:
    """Step of the group that pushes one gradient of its whole batch to the shards.

    Args:
        model: A compiled, built model; its optimizer is replaced by a recording one.
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
        self._compute = current().gradient_step(model, self.layout, manifest.loss_scale, ())
        self._shared = SharedDenominator(communicator)
        self._exchange, self._sum = exchange, communicator.sum_vector

    def probe(self, batch: Any) -> None:
        """Compute a gradient and discard it."""
        _ = self._compute(self._start, batch, version=0).vector  # waits for it

    def prepare(self, batch: Any) -> PreparedBatch:
        """Convert a pytree of arrays to the tensors that the step needs, ahead of the call."""
        return self._compute.prepare(batch)

    def __call__(
        self, batch: Any, weight: float, pause: Pause, *, samples: int, rate: float, task: Task
    ) -> Mapping[str, Any]:
        """Train on this rank's part of a batch of the group; collective, like ``AllreduceStep``."""
        weights, share = self._exchange.current_weights(), weight * task.share_of(samples)
        own: Any = np.zeros(self.layout.size, np.float32)
        logs, counted = dict[str, Any](), None
        if batch is not None:
            began = time.perf_counter()
            result = self._compute(weights, batch, version=self._exchange.version, share=share)
            own, logs, counted = result.vector, result.logs, result.denominator
            pause(time.perf_counter() - began)
        self._shared.agree(counted, has_rows=batch is not None)
        part, denominator = self._union(counted, weight)
        gradient = self._sum(own, part)
        self._exchange.push(gradient, samples, 1.0 if math.isinf(denominator) else rate, task, denominator)
        return logs

    def _union(self, counted: Any, share: float) -> tuple[float, float]:
        """Return the weight of this rank's gradient in the group's, and the denominator of that, as in a push.

        Collective if denominators are counted.

        Args:
            counted: Denominator of this rank, 0-d float32; None: that of its samples.
            share: Fraction of all samples in this rank's part; 0 for a rank without rows.
        """
        if self._shared.is_sum:
            return 1.0, SUM
        if not self._shared.is_counted:
            return share, 0.0
        own = share if counted is None else float(counted)
        total = float(self._sum(np.array([own], np.float32))[0])
        return own / total if total else math.nan, total
