"""Conversion of Keras objects to a transferable program, and back."""
