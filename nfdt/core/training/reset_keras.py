"""Reset of Keras to its state in a new process."""

from __future__ import annotations

import keras


def reset_keras(seed: int) -> None:
    """Clear the names of earlier models, and seed Keras, NumPy and Python."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
