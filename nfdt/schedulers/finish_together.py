"""Division of the rest of an epoch, so that it is over as soon as possible and all workers end together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.schedulers.proportions import water_fill
from nfdt.schedulers.throughput import StepTime


@dataclass(frozen=True)
class Runner:
    """A worker as it stands now.

    Attributes:
        free_in_s: Seconds until it has done what it holds, >= 0.
        step_s: Seconds of one of its steps, > 0.
        samples: Samples of one of its steps, >= 1.
    """

    free_in_s: float
    step_s: float
    samples: int = 1


def steps_to_share(remaining: int, runners: Sequence[Runner]) -> list[int]:
    """Return how many further steps each worker does so that ``remaining`` samples are done soonest.

    Water-filling gives the time at which all would be done if steps could be cut anywhere; each worker gets the
    whole steps that fit into it, and the rest goes, step by step, to the worker that is done with one more first. It is
    the earliest possible end for whole steps, and no worker idles at the end for as long as one of its own steps takes.

    Args:
        remaining: Samples that are not leased, >= 0.
        runners: The workers, at least one.

    Returns:
        Steps of each worker; together they hold at least ``remaining`` samples. 0: nothing is left for it that others
        would not have done before.
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
