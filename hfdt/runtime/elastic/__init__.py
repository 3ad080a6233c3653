"""Allreduce rings whose ranks may join and leave while a job runs."""
