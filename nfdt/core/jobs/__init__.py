"""Jobs, their life and their artifacts."""
