"""Who may proceed."""
