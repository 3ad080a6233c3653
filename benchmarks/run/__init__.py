"""Benchmarks: one file for each name of ``scripts/bench``."""
