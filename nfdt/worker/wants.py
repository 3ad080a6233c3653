"""What the loop of a worker wants of its driver: values that :meth:`nfdt.worker.loop.WorkerLoop.run` yields.

They are not frozen: a step needs four of them, and a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.transport.base import Pulled


@dataclass(slots=True)
class Ask:
    """Send a report. Answer: the next instruction."""

    report: ins.Report


@dataclass(slots=True)
class AskAhead:
    """Begin to send a report while a task is computed; :class:`TakeAhead` takes the instruction."""

    report: ins.Report


@dataclass(slots=True)
class TakeAhead:
    """Wait for the instruction that was requested ahead. Answer: it, or None unless it is work."""


@dataclass(slots=True)
class Prepare:
    """Read the batches of a lease, which begins with the first of these tasks."""

    tasks: Sequence[Task]


@dataclass(slots=True)
class Pull:
    """Let the pipeline pull weights; ``exact``: without loss."""

    exact: bool = False


@dataclass(slots=True)
class Compute:
    """Compute the gradient of a task on pulled weights. Answer: :class:`Step`."""

    task: Task
    held: Pulled


@dataclass(slots=True)
class Difference:
    """Subtract the weights after the steps that pushed nothing from the pulled ones. Answer: shape ``(P,)``."""

    held: Pulled


@dataclass(slots=True)
class Overlap:
    """Do what can be done while the push of a step travels: prepare the following task, or that of the next lease."""

    step: Step
    following: Task | None


@dataclass(slots=True)
class Settle:
    """Wait until at most ``unanswered`` pushes are unanswered. Answer: that of :meth:`Pipeline.settle`."""

    unanswered: int


@dataclass(slots=True)
class Execute:
    """Execute an instruction as far as the loop does not; of work, take the untrained state. Answer: the report."""

    instruction: ins.Instruction


@dataclass(slots=True)
class Move:
    """Connect to the restored shards, and drop what was requested or prepared before."""


Want = Ask | AskAhead | TakeAhead | Prepare | Pull | Compute | Difference | Overlap | Settle | Execute | Move


@dataclass(slots=True)
class Step:
    """A step of a task.

    Attributes:
        gradient: Vector to push, shape ``(P,)`` float32, or rows; None: the worker has updated weights of its own.
        samples: Number of samples.
        logs: Running logs, name -> 0-d tensor.
        seconds: Duration of the computation.
        denominator: Denominator of the loss; 0: the number of samples, infinity: the loss is a sum.
        due: Without a gradient: whether what the worker's own steps have changed is pushed now.
    """

    gradient: Any
    samples: int
    logs: Mapping[str, Any]
    seconds: float
    denominator: float = 0.0
    due: bool = True


Acts = Mapping[type[Want], Callable[[Any], Any]]
"""What a driver does for each kind of want: a function of the want that returns the answer."""
