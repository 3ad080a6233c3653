"""Backends of Keras: what a program and its steps need of TensorFlow, JAX or PyTorch beyond Keras' own operations."""
