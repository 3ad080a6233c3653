"""Runtime of the ranks of an allreduce ring that works for a job server."""
