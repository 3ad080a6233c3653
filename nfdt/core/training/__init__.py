"""What runs inside a training step, whoever runs it."""
