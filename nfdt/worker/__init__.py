"""Worker processes: the slot that waits for a job, and the training loop."""
