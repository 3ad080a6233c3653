"""Arguments of ``compile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from nfdt.core.keras_internals import serialization_lib
from nfdt.core.program.manifest import Manifest


def describe_compilation(model: Any, compile_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the manifest's ``compile``.

    Args:
        model: A compiled model.
        compile_config: Compile configuration that Keras serialised; its optimizer is replaced by the model's.
    """
    return {**(compile_config or {}), "optimizer": serialization_lib.serialize_keras_object(model.optimizer)}


def overrides(model: Any, method: str) -> bool:
    """Return whether the user's class replaces a method of ``keras.Model``, or the script that of this model."""
    return getattr(type(model), method) is not getattr(keras.Model, method) or method in vars(model)


def compile_model(model: Any, manifest: Manifest, *, safe_mode: bool) -> None:
    """Compile a model that was rebuilt from its configuration, with the arguments of the user's model."""
    config = serialization_lib.deserialize_keras_object(manifest.compile_config, safe_mode=safe_mode)
    # The optimizer in the configuration is already wrapped where necessary.
    keras.Model.compile(model, **config, auto_scale_loss=False)
