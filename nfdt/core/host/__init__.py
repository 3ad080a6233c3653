"""Facts about the machine and the process environment."""
