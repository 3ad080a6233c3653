"""Jobs on Horovod as their coordinator sees them: a ring, and each group, is one worker with the batch of its ranks."""

from __future__ import annotations

from nfdt.consistency import Barrier, ConsistencyPolicy, Free, make_policy
from nfdt.core.errors import PolicyRefused
from nfdt.core.specs.job import JobSpec
from nfdt.launch.horovod_command import RingShape


class Rounds(Free):
    """Free, and a lease holds the steps between two reports: a group's push, or an elastic ring's commit."""

    def __init__(self, steps: int) -> None:
        self.lease_limit: int | None = steps


def is_ring(spec: JobSpec) -> bool:
    """Whether the job's workers are the ranks of one allreduce ring."""
    return spec.algorithm.topology == "ring"


def is_grouped(spec: JobSpec) -> bool:
    """Whether the job's workers are the ranks of several worlds, synchronous inside and free between."""
    return spec.algorithm.topology == "groups"


def epochs_allow_groups(spec: JobSpec) -> bool:
    """Whether the flat workers of a job may turn to groups, whose epochs are then what they were."""
    whole = spec.train.kind == "arrays" and spec.fit.steps_per_epoch is None
    return whole and spec.algorithm.plan == "topology" and spec.algorithm.topology == "flat"


def grouped(spec: JobSpec) -> JobSpec:
    """The job with its workers in groups instead of flat."""
    algorithm = spec.algorithm.model_copy(update={"topology": "groups", "overlap": 0})
    return spec.model_copy(update={"algorithm": algorithm})


def slots_of(spec: JobSpec) -> int:
    """How many worker slots the job wants of the pool; those of groups come with their worlds."""
    return {"ring": 1, "groups": 0}.get(spec.algorithm.topology, spec.cluster.workers)


def seen_by_coordinator(spec: JobSpec, groups: int = 0, ranks: int | None = None) -> JobSpec:
    """The specification with the ranks' batch for local ones where a ring, or each of ``groups``, plays one worker.

    Args:
        spec: The job.
        groups: How many there are.
        ranks: Of the ring; None: as many as the job wants.
    """
    if is_grouped(spec):
        return _seen_with_groups(spec, groups)
    if not is_ring(spec):
        return spec
    size, fit = ranks or spec.cluster.workers, spec.fit
    cluster = spec.cluster.model_copy(update={"workers": 1})
    changes: dict[str, int] = {}
    if spec.train.kind == "arrays":
        changes["batch_size"] = size * fit.batch_size
    if fit.validation_steps is None:
        changes["validation_batch_size"] = size * (fit.validation_batch_size or fit.batch_size)
    return spec.model_copy(update={"cluster": cluster, "fit": fit.model_copy(update=changes)})


def _seen_with_groups(spec: JobSpec, groups: int) -> JobSpec:
    fit, size = spec.fit, -(-spec.cluster.workers // groups)
    changes = {"batch_size": size * fit.batch_size} if spec.train.kind == "arrays" else {}
    if fit.validation_steps is None:
        changes["validation_batch_size"] = size * (fit.validation_batch_size or fit.batch_size)
    cluster = spec.cluster.model_copy(update={"workers": groups})
    return spec.model_copy(update={"cluster": cluster, "fit": fit.model_copy(update=changes)})


def policy_of(spec: JobSpec) -> ConsistencyPolicy:
    """Who may proceed. The ranks of a ring hold each other in step, so nobody else has to.

    Batches that a client feeds come one by one: a round is one per rank, all of them leased at once.
    """
    if is_grouped(spec) and spec.algorithm.outer == "delta":
        return Rounds(spec.algorithm.local_steps)
    if not is_ring(spec):
        return make_policy(spec.algorithm)
    if spec.train.kind == "stream":
        return Barrier(parts=spec.cluster.workers)
    return Rounds(spec.cluster.commit_steps) if spec.cluster.elastic else Free()


def refuse_reach(shape: RingShape) -> None:
    """A shared server logs in nowhere, and reads, runs and writes no file that a job names.

    Raises:
        PolicyRefused: the job asks for that.
    """
    if shape.hosts or shape.hostfile or shape.elastic.network_interfaces or shape.launcher == "world":
        raise PolicyRefused(
            "A shared server logs in nowhere on a job's behalf. Expected: a job without hosts, hostfile, "
            "network_interfaces or launcher='world'. Run the script without server=, or start it with mpirun."
        )
    if shape.files:
        raise PolicyRefused(
            "A shared server reads, runs and writes no file that a job names. Expected: a job without "
            "host_discovery_script, timeline or autotune_log. Received: "
            f"{', '.join(shape.files)}. Run the script without server=."
        )
