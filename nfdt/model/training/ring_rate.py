"""The factor of the learning rate in an allreduce ring, by the options ``scale_lr`` and ``warmup_epochs``."""

from __future__ import annotations

from nfdt.core.specs.job import JobSpec


def ring_rate(spec: JobSpec, size: int, step: int) -> float:
    """Return the factor of the user's learning rate at this step of a ring.

    Args:
        spec: The job, with the batch of one rank in ``fit.batch_size``.
        size: Number of ranks.
        step: Number of updates done, counted within the job.
    """
    algorithm, fit = spec.algorithm, spec.fit
    batches = spec.train.batches or -(-(spec.train.samples or 0) // fit.batch_size)
    per_epoch = fit.steps_per_epoch or -(-batches // size)
    return learning_rate_factor(algorithm.scale_lr, size, step, round(algorithm.warmup_epochs * per_epoch))


def learning_rate_factor(kind: str | None, size: int, step: int, warmup_steps: int) -> float:
    """Return the factor on the user's learning rate at this step (counted from 0 within the job).

    Args:
        kind: ``linear``, ``sqrt``, or None for 1.
        size: Number of ranks.
        step: Number of updates done.
        warmup_steps: Number of updates over which the factor rises linearly from 1.

    References:
        Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2 (gradual warm-up).
    """
    full = {"linear": float(size), "sqrt": size**0.5}.get(kind or "", 1.0)
    if step >= warmup_steps:
        return full
    return 1.0 + (full - 1.0) * (step + 1) / (warmup_steps + 1)
