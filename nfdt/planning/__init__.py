"""Cost of presets on measured workers, and forecasts of their speed: pure, without clock or thread."""
