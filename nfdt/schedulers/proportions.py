"""Division of samples or steps among workers by speed, so that all workers end at the same time.

Worker i computes n samples in ``alpha_i + beta_i * n`` seconds. All workers end at T if worker i takes
``n_i(T) = (T - alpha_i) / beta_i``, limited to ``least`` and ``most``. T is the time at which the n_i sum up to the
total (water-filling). With alpha = 0 the shares are proportional to the speeds 1 / beta_i.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.schedulers.throughput import StepTime


def largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that sum up to ``total``, each less than 1 from its share of ``total``.

    Args:
        total: Number to divide, >= 0.
        shares: Shares, >= 0, on any scale; not all 0 unless ``total`` is 0.

    Returns:
        One number per share. Of equal remainders the first is rounded up.

    Raises:
        ValueError: All shares are 0.
    """
    whole = math.fsum(shares)
    if total and not whole > 0:
        raise ValueError(f"Shares of {total}: expected at least one above 0. Received: {list(shares)}.")
    exact = [total * share / whole if whole else 0.0 for share in shares]
    counts = [math.floor(x) for x in exact]
    rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


def water_fill(
    total: float, times: Sequence[StepTime], *, least: float = 0.0, most: float = math.inf
) -> tuple[float, list[float]]:
    """Return the common end time of all workers and the number of samples of each until then.

    Args:
        total: Samples to compute, between ``least`` and ``most`` times the number of workers.
        times: Step time of each worker; alpha includes all time before its first sample.
        least: Minimum number of samples of one worker.
        most: Maximum number of samples of one worker.

    Returns:
        T in seconds and the samples of each worker; a worker whose alpha is beyond T computes ``least``.

    Raises:
        ValueError: The total lies outside the bounds, or there are no workers.
    """
    count = len(times)
    if not count or not count * least <= total <= count * most:
        raise ValueError(f"Total: expected {count} workers times {least:g} to {most:g} samples. Received: {total:g}.")
    changes = [(time.seconds(least), 1 / time.beta_s) for time in times]
    if most < math.inf:
        changes += [(time.seconds(most), -1 / time.beta_s) for time in times]
    changes.sort()
    level, pace, done = changes[0][0], 0.0, count * least
    for at, change in changes:
        if done + pace * (at - level) >= total and pace > 0:
            break
        done += pace * (at - level)
        level, pace = at, pace + change
    if pace > 0:
        level += max(0.0, total - done) / pace
    return level, [min(most, max(least, (level - time.alpha_s) / time.beta_s)) for time in times]


def equal_time_split(
    total: int,
    times: Sequence[StepTime],
    *,
    least: int = 0,
    most: int | None = None,
    smallest: int = 0,
    unit: int = 1,
) -> list[int]:
    """Return whole samples for each worker so that all end together, within the time of one sample each.

    Args:
        total: Samples to compute.
        times: Step time of each worker.
        least: Minimum number of samples of one worker; every worker gets them.
        most: Maximum number of samples of one worker; None for no bound.
        smallest: A worker that would get fewer is left out and gets none (``least`` must be 0).
        unit: All numbers are multiples of it, except that one worker gets the rest of the total, too. The bounds are
            taken to the next multiples between them.

    Raises:
        ValueError: The total lies outside the bounds, or there are no workers.
    """
    if unit > 1:
        lines = [StepTime(time.alpha_s, time.beta_s * unit) for time in times]
        bounds = {"least": -(-least // unit), "smallest": -(-smallest // unit)}
        units = equal_time_split(total // unit, lines, most=None if most is None else most // unit, **bounds)
        counts, rest = [unit * count for count in units], total % unit
        counts[min(range(len(times)), key=lambda i: times[i].seconds(counts[i] + rest))] += rest
        return counts
    chosen = list(range(len(times)))
    bound = math.inf if most is None else most
    while True:
        _, shares = water_fill(total, [times[i] for i in chosen], least=least, most=bound)
        kept = [i for i, share in zip(chosen, shares, strict=True) if share >= smallest]
        if len(kept) in (0, len(chosen)) or len(kept) * bound < total:
            break
        chosen = kept
    counts = [0] * len(times)
    for i, count in zip(chosen, _whole(total, shares), strict=True):
        counts[i] = count
    return counts


def proportional_split(
    total: int, rates: Sequence[float], *, least: int = 0, most: int | None = None, unit: int = 1
) -> list[int]:
    """Return whole samples for each worker in proportion to its speed, between ``least`` and ``most``.

    Args:
        total: Samples to divide.
        rates: Samples per second of each worker, > 0, on any scale.
        least: Minimum number of samples of one worker.
        most: Maximum number of samples of one worker; None for no bound.
        unit: See :func:`equal_time_split`.

    Raises:
        ValueError: The total lies outside the bounds, or there are no workers.
    """
    return equal_time_split(total, [StepTime(0.0, 1 / rate) for rate in rates], least=least, most=most, unit=unit)


def _whole(total: int, shares: Sequence[float]) -> list[int]:
    """Round shares that sum up to the total but for rounding to whole numbers that do; none leaves its bounds."""
    counts = [math.floor(share + 1e-9) for share in shares]
    rest = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i])
    for i in rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


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
