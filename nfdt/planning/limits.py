"""Limits of all algorithms: the known lower bound on time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LowerBound:
    """The least time to a stationary point, and the number of workers that attains it.

    Attributes:
        seconds: Time in units of ``L * Delta / eps``: smoothness times distance in loss over target squared gradient.
        workers: Number of fastest workers that are useful; the others add nothing.
    """

    seconds: float
    workers: int


def lower_bound(seconds: Sequence[float], noise: float) -> LowerBound:
    """Return the lower bound on time of all methods with stochastic gradients on these workers, up to a constant.

    ``T* = min_m [ (1/m sum_{i<=m} 1/tau_i)^-1 * (1 + noise / m) ]``, with tau ascending, in units of ``L Delta / eps``.

    Args:
        seconds: Seconds of one gradient of each worker, tau_i > 0.
        noise: Variance of the gradient over eps, the target squared gradient norm.

    References:
        Tyurin and Richtarik, NeurIPS 2023, "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under
        a Fixed Computation Model"; quoted from memory, checked against values computed by hand only.
    """
    speed, best = 0.0, LowerBound(float("inf"), 0)
    for count, taken in enumerate(sorted(seconds), start=1):
        speed += 1 / taken
        bound = (count + noise) / speed
        if bound < best.seconds:
            best = LowerBound(bound, count)
    return best


def of_lower_bound(seconds: Sequence[float], noise: float, gradients_per_s: float, under_way: float) -> float:
    """Return the least time of any method over that of one with ``gradients_per_s``; at most 1.

    P gradients that are computed at the same time, delayed or averaged, are known to make the progress of one machine
    with ``P + noise`` of them per ``L Delta / eps``, up to a constant. This takes ``(P + noise) / gradients_per_s``.
    The ratio is at most 1 if P is at least the number of workers and no worker is faster than its ``seconds``.

    Args:
        seconds: Seconds of one gradient of each worker, > 0.
        noise: See :func:`lower_bound`.
        gradients_per_s: Measured rate of all workers together.
        under_way: P, the number of gradients in flight.

    References:
        Mishchenko, Bach, Even and Woodworth, NeurIPS 2022, "Asynchronous SGD Beats Minibatch SGD Under Arbitrary
        Delays"; quoted from memory.
    """
    return lower_bound(seconds, noise).seconds * gradients_per_s / (under_way + noise)
