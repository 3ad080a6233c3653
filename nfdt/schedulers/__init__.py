"""Distribution of samples to workers: pure, without clock or thread."""
