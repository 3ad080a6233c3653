"""Benchmarks of speed and accuracy against other frameworks: ``scripts/bench NAME``."""
