"""What a delayed gradient becomes."""
