"""Test suites of others, run plain and distributed: ``scripts/conformance``."""
