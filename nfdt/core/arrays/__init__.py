"""Arrays by name, in flat vectors, by rows, and as nested structures."""
