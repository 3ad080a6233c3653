"""Who gets which rows of a global batch: values in, values out."""

from __future__ import annotations


def split_rows(start: int, stop: int, size: int, rank: int) -> tuple[int, int]:
    """The part ``[start, stop)`` of a global batch that a rank computes: parts differ by one row at most.

    A batch of fewer rows than ranks leaves the last ranks an empty part.
    """
    rows = stop - start
    share, rest = divmod(rows, size)
    begin = start + rank * share + min(rank, rest)
    return begin, begin + share + (rank < rest)


def weight_of(rows: int, total: int) -> float:
    """The weight of a mean over ``rows`` in the mean over ``total``."""
    return rows / total if total else 0.0


def learning_rate_factor(kind: str | None, size: int, step: int, warmup_steps: int) -> float:
    """What the user's learning rate is multiplied by at this step (counted from 0 within the job).

    Args:
        kind: ``linear``, ``sqrt``, or None for 1.
        size: Ranks.
        step: Updates done.
        warmup_steps: Updates over which the factor rises linearly from 1.

    References:
        Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2 (gradual warm-up).
    """
    full = {"linear": float(size), "sqrt": size**0.5}.get(kind or "", 1.0)
    if step >= warmup_steps:
        return full
    return 1.0 + (full - 1.0) * (step + 1) / (warmup_steps + 1)
