"""A Keras model as data and as steps: programs, training, and the backends of Keras."""
