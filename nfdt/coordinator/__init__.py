"""Tasks, membership and epochs of one job."""
