"""What the benchmarks train and send: models, images, batches, simulated jobs, and the timing of epochs."""
