"""Faults on a local cluster while a script trains: a schedule, its injection, and a report."""
