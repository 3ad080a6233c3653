"""Topologies, the connections among a job's workers: none, one allreduce ring, or groups."""
