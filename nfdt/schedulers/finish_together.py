"""Division of the rest of an epoch, so that it ends as early as possible and all workers end together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.schedulers.proportions import water_fill
from nfdt.schedulers.throughput import StepTime


@dataclass(frozen=True)
class Runner:
    """The current state of a worker.

    Attributes:
        free_in_s: Seconds until it has finished the tasks that it holds, >= 0.
        step_s: Seconds per step, > 0.
        samples: Samples per step, >= 1.
    """

    free_in_s: float
    step_s: float
    samples: int = 1


def steps_to_share(remaining: int, runners: Sequence[Runner]) -> list[int]:
    """Return the number of further steps of each worker with which ``remaining`` samples are finished earliest.

    Water-filling gives the common end time for steps that can be cut anywhere. Each worker gets the whole steps that
    fit into it. The rest is assigned step by step to the worker that would finish one more step first. This is the
    earliest possible end for whole steps, and no worker idles at the end for as long as one of its own steps takes.

    Args:
        remaining: Samples that are not leased, >= 0.
        runners: The workers, at least one.

    Returns:
        Steps of each worker; together they hold at least ``remaining`` samples. 0: others finish the rest earlier.
    """
    lines = [StepTime(r.free_in_s, r.step_s / r.samples) for r in runners]
    end, _ = water_fill(remaining, lines)
    steps = [max(0, math.floor((end - r.free_in_s) / r.step_s + 1e-9)) for r in runners]
    left = remaining - sum(n * r.samples for n, r in zip(steps, runners, strict=True))
    queue = [(r.free_in_s + (n + 1) * r.step_s, i) for i, (n, r) in enumerate(zip(steps, runners, strict=True))]
    heapq.heapify(queue)
    while left > 0:
        done_at, i = queue[0]
        steps[i] += 1
        left -= runners[i].samples
        heapq.heapreplace(queue, (done_at + runners[i].step_s, i))
    return steps
