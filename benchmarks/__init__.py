"""What is measured, against whom: ``scripts/bench NAME``."""
