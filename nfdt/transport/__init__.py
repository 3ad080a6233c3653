"""How a worker reaches the shards."""
