"""The device that computes gradients."""

from __future__ import annotations

import platform

import keras


def device_name() -> str:
    """Return the name of the accelerator that the backend uses, else that of the processor's architecture."""
    if keras.backend.backend() == "jax":
        import jax

        device = jax.devices()[0]
        return platform.machine() if device.platform == "cpu" else str(device.device_kind)
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(found[0]) if found else {}
    return str(details.get("device_name", platform.machine()))
