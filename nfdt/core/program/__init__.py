"""Keras objects to a shippable program, and back."""
