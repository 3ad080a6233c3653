"""Specification of a job: presets and options as validated values."""
