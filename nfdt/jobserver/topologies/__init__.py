"""Topologies, the connections among a job's workers: none, one allreduce ring, or groups.

A new one is one file, one line here, and one value of the option ``topology``.
"""

from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.topologies.allreduce import AllreduceTopology
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.flat import FlatTopology
from nfdt.jobserver.topologies.groups import GroupsTopology

TOPOLOGIES: dict[str, type[Topology]] = {
    "flat": FlatTopology,
    "ring": AllreduceTopology,
    "groups": GroupsTopology,
}


def topology_class(spec: JobSpec) -> type[Topology]:
    """Return the class that runs the workers of a job."""
    return TOPOLOGIES[spec.algorithm.topology]
