"""What the benchmarks compare with: loops written by hand, other strategies, and their processes and environments."""
