"""Data, steps, metrics and untrained state of a model in a process that trains it."""
