"""The driver of a worker's loop: the loop yields a method of it with arguments, and is sent the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.arrays.layout import Array
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.transport.base import ParameterClient, Pulled
from nfdt.worker.pipeline import Pipeline

Want = tuple[Any, ...]
"""A method of :class:`LoopDriver` and its arguments, to call; the loop is sent the result."""


@dataclass(slots=True)
class Step:
    """A step of a task.

    Attributes:
        gradient: Vector to push, shape ``(P,)`` float32, its pieces, or rows; None: the worker has updated weights of
            its own.
        samples: Number of samples.
        logs: Running logs, name -> 0-d tensor.
        seconds: Duration of the computation.
        denominator: Denominator of the loss; 0: the number of samples, infinity: the loss is a sum.
        due: Without a gradient: whether what the worker's own steps have changed is pushed now.
        batches: Number of batches: of steps of the worker's own optimizer.
    """

    gradient: Any
    samples: int
    logs: Mapping[str, Any]
    seconds: float
    denominator: float = 0.0
    due: bool = True
    batches: int = 1


class LoopDriver:
    """Base class of drivers.

    The loop calls the first seven methods itself. It yields the others, which may wait. Where a driver cannot block its
    thread, such a method returns a generator.

    Args:
        spec: The job.
        client: Client of the shards.

    Attributes:
        spec: The job.
        pipeline: Weights and pushes in flight, each with its tasks and their samples.
    """

    def __init__(self, spec: JobSpec, client: ParameterClient) -> None:
        self.spec = spec
        self.pipeline: Pipeline[list[tuple[Task, int]]] = Pipeline(client)

    def stopped(self) -> bool:
        """Return whether the job is over for this worker, also in the middle of an instruction."""
        return False

    def ending(self) -> bool:
        """Return whether this worker shall leave the job after the step that it has begun."""
        return False

    def moved(self) -> bool:
        """Return whether the shards have been restored elsewhere."""
        return False

    def rate(self, samples: int, denominator: float) -> float:
        """Return the factor of the learning rate of a vector of so many samples with this denominator."""
        return self.spec.rate_of(samples, denominator)

    def metrics(self) -> bytes:
        """Return the state of the metrics since the epoch began; empty if it is not known."""
        return b""

    def begin_apart(self) -> None:
        """Count the metrics of the next task apart from those of the epoch."""

    def end_apart(self) -> bytes:
        """Return the metrics that were counted apart, and count those of the epoch again."""
        return b""

    def ask(self, report: ins.Report) -> Any:
        """Send a report; return the next instruction."""

    def ask_ahead(self, report: ins.Report) -> Any:
        """Begin to send a report while a task is computed."""

    def await_ahead(self) -> Any:
        """Wait for the instruction that was requested ahead; return it, or None unless it is work."""

    def prepare(self, tasks: Sequence[Task]) -> Any:
        """Read the batches of a lease, which begins with the first of these tasks."""

    def pull(self) -> Any:
        """Let the pipeline pull weights."""
        self.pipeline.weights()

    def pull_exactly(self) -> Any:
        """Let the pipeline pull weights without loss."""
        self.pipeline.weights(exact=True)

    def pull_kept(self) -> Any:
        """Let the pipeline pull the weights that the shards keep."""
        self.pipeline.pull_kept()

    def compute(self, task: Task, held: Pulled) -> Any:
        """Compute the gradient of a task on pulled weights; return :class:`Step`."""

    def difference(self, held: Array) -> Any:
        """Return pulled weights less those after the steps that pushed nothing, shape ``(P,)``."""

    def forget(self) -> Any:
        """Go on from the weights of the last reply, without the steps that pushed nothing."""

    def overlap(self, step: Step, following: Task | None) -> Any:
        """Use the time in which the push of a step travels: prepare the following task, or that of the next lease."""

    def await_replies(self, unanswered: int) -> Any:
        """Wait until at most so many pushes are unanswered; return the replies as the pipeline does."""
        return self.pipeline.await_replies(unanswered)

    def execute(self, instruction: ins.Instruction) -> Any:
        """Execute an instruction as far as the loop does not; of work, take the untrained state. Return the report."""

    def move(self) -> Any:
        """Connect to the restored shards, and drop what was requested or prepared before."""
