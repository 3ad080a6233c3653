"""An allreduce job as its coordinator sees it: one worker, the ring, whose batches are global ones."""

from __future__ import annotations

from nfdt.consistency import Barrier, ConsistencyPolicy, Free, make_policy
from nfdt.core.spec import JobSpec


def is_ring(spec: JobSpec) -> bool:
    """Whether the job's workers are the ranks of one allreduce ring."""
    return spec.algorithm.topology == "ring"


def slots_of(spec: JobSpec) -> int:
    """How many worker slots the job wants."""
    return 1 if is_ring(spec) else spec.cluster.workers


def seen_by_coordinator(spec: JobSpec) -> JobSpec:
    """The specification with global batches for local ones where the ring plays one worker."""
    if not is_ring(spec):
        return spec
    size, fit = spec.cluster.workers, spec.fit
    cluster = spec.cluster.model_copy(update={"workers": 1})
    changes: dict[str, int] = {}
    if spec.train.kind == "arrays":
        changes["batch_size"] = size * fit.batch_size
    if fit.validation_steps is None:
        changes["validation_batch_size"] = size * (fit.validation_batch_size or fit.batch_size)
    return spec.model_copy(update={"cluster": cluster, "fit": fit.model_copy(update=changes)})


def policy_of(spec: JobSpec) -> ConsistencyPolicy:
    """Who may proceed. The ranks of a ring hold each other in step, so nobody else has to.

    Batches that a client feeds come one by one: a round is one per rank, all of them leased at once.
    """
    if not is_ring(spec):
        return make_policy(spec.algorithm)
    return Barrier(parts=spec.cluster.workers) if spec.train.kind == "stream" else Free()
