"""The client: captures a ``fit`` call, submits it as a job, and mirrors the job's events."""
