"""Comparison of a script's results on one machine and distributed: verdicts and a report. Values in, values out."""
