"""Code of a training step, for every kind of worker."""
