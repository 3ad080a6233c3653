"""Steps and operations that differ between Keras on TensorFlow, JAX and PyTorch."""
