"""Start and end of the cluster's processes."""
