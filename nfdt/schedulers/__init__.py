"""Who gets which samples."""
