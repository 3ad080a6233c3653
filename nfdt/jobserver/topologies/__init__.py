"""How the workers of a job are connected: independent, in one allreduce ring, or in groups."""
