"""Transport between a worker and the shards."""
