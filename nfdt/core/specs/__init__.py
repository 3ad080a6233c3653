"""What a job is: specifications, presets and options, as validated values."""
