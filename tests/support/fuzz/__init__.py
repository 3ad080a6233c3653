"""Made-up bytes and calls for every port of a job server and of a shard."""
