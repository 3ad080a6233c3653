"""Reports of the benchmarks: JSON files, tables and pictures."""
