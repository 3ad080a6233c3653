"""Topologies for the coordinator and the simulator: pure values, without threads, slots or Horovod.

For the coordinator an allreduce ring, and each group of ranks, is one worker with the batch of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from nfdt.consistency import Barrier, ConsistencyPolicy, Free, Rounds, make_policy
from nfdt.core.specs.job import JobSpec
from nfdt.core.specs.presets import TOPOLOGY_FACTS, TopologyFacts


class TopologyView:
    """Pure properties of one topology.

    Attributes:
        facts: Those that packages without access to the policies read too.
    """

    facts: TopologyFacts

    @property
    def launched(self) -> bool:
        """Whether the server launches the workers as ranks of Horovod, instead of using registered slots."""
        return not self.facts.flat

    @property
    def pushes(self) -> bool:
        """Whether workers push to shards; otherwise each worker holds the optimizer, and rank 0 serves the state."""
        return not self.facts.allreduce

    @property
    def forms_groups(self) -> bool:
        """Whether the ranks are divided into groups, which are found by measurement."""
        return self.facts.grouped

    def slots_wanted(self, spec: JobSpec) -> int:
        """Return the number of worker slots that the job takes from the pool before it begins: one per worker."""
        return spec.cluster.workers

    def effective_spec(self, spec: JobSpec, *, groups: int = 1, ranks: int | None = None) -> JobSpec:
        """Return the specification for the coordinator, the job unless ranks stand for one worker.

        Args:
            spec: The job.
            groups: Number of groups, if the topology forms groups.
            ranks: Number of ranks of one allreduce ring; None: the number that the job requests.
        """
        return spec

    def policy(self, spec: JobSpec) -> ConsistencyPolicy:
        """Return the consistency policy between the workers of the coordinator, that which the algorithm names."""
        return make_policy(spec.algorithm)

    def may_form_groups(self, spec: JobSpec) -> bool:
        """Whether the workers of the job may form groups between two epochs; the batches stay the same."""
        return False


class FlatView(TopologyView):
    """Independent workers that push to shards."""

    facts = TOPOLOGY_FACTS["flat"]

    def may_form_groups(self, spec: JobSpec) -> bool:
        """Whether the job plans its topology and trains whole epochs of arrays."""
        whole = spec.train.kind == "arrays" and spec.fit.steps_per_epoch is None
        return whole and spec.algorithm.plan == "topology"


class AllreduceView(TopologyView):
    """All ranks in one allreduce ring, which is one worker with the global batch."""

    facts = TOPOLOGY_FACTS["ring"]

    def slots_wanted(self, spec: JobSpec) -> int:
        """Return 1, the slot of rank 0."""
        return 1

    def effective_spec(self, spec: JobSpec, *, groups: int = 1, ranks: int | None = None) -> JobSpec:
        """Return a job of one worker with the batch of all ranks."""
        return _with_workers(spec, 1, ranks or spec.cluster.workers)

    def policy(self, spec: JobSpec) -> ConsistencyPolicy:
        """Return the free policy, because the ranks synchronise themselves.

        Of whole batches, a round is one per rank, and all are leased at once.
        """
        if not spec.train.sized:
            return Barrier(parts=spec.cluster.workers)
        return Rounds(spec.cluster.commit_steps) if spec.cluster.elastic else Free()


class GroupsView(TopologyView):
    """Groups of ranks, synchronous within a group and asynchronous between groups; each group is one worker."""

    facts = TOPOLOGY_FACTS["groups"]

    def slots_wanted(self, spec: JobSpec) -> int:
        """Return 0: the slots of the leaders register when their groups have started."""
        return 0

    def effective_spec(self, spec: JobSpec, *, groups: int = 1, ranks: int | None = None) -> JobSpec:
        """Return a job of one worker per group, with the batch of the largest group."""
        return _with_workers(spec, groups, -(-spec.cluster.workers // groups))


FLAT, ALLREDUCE, GROUPS = FlatView(), AllreduceView(), GroupsView()
VIEWS: Mapping[str, TopologyView] = {"flat": FLAT, "ring": ALLREDUCE, "groups": GROUPS}


def view_of(spec: JobSpec) -> TopologyView:
    """Return the view of the job's topology."""
    return VIEWS[spec.algorithm.topology]


def grouped(spec: JobSpec) -> JobSpec:
    """Return the job with its workers in groups instead of flat."""
    algorithm = spec.algorithm.model_copy(update={"topology": "groups", "overlap": 0})
    return spec.model_copy(update={"algorithm": algorithm})


def _with_workers(spec: JobSpec, workers: int, ranks: int) -> JobSpec:
    """Return the job with ``workers`` workers, each with the batch of ``ranks`` ranks."""
    fit = spec.fit
    changes = {"batch_size": ranks * fit.batch_size} if spec.train.kind == "arrays" else {}
    if fit.validation_steps is None:
        changes["validation_batch_size"] = ranks * (fit.validation_batch_size or fit.batch_size)
    cluster = spec.cluster.model_copy(update={"workers": workers})
    return spec.model_copy(update={"cluster": cluster, "fit": fit.model_copy(update=changes)})
