"""What the machine and the process environment provide."""
