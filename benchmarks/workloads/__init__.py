"""Workloads of the benchmarks: models, images, batches, shards, simulated jobs, and the timing of epochs."""
