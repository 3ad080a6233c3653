"""A shard of the parameter server."""
