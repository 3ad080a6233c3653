"""Launch of ranks with horovodrun."""
