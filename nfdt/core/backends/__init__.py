"""Backends of Keras: what a program and its steps need of TensorFlow or JAX beyond Keras' own operations."""
