"""Rings whose ranks may come and go while a job runs."""
