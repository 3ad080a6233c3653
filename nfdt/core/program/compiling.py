"""Arguments of ``compile``, also where the user's model overrides it.

A model that overrides ``compile`` usually passes a part of the arguments to ``super().compile(...)`` and assigns the
rest to attributes. Keras does not compile such a model on loading; here the part is compiled and the rest assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from nfdt.core.errors import CaptureError
from nfdt.core.keras_internals import compile_arguments, serialization_lib
from nfdt.core.program.manifest import CompileEntries, Manifest
from nfdt.core.program.parts import assigned

_OPTIMIZER = {"class_name": "__model_optimizer__"}


def describe_compilation(model: Any, compile_config: Any) -> CompileEntries:
    """Return the manifest's ``compile`` and ``compile_attributes``.

    Args:
        model: A compiled model.
        compile_config: Compile configuration that Keras serialised.

    Raises:
        CaptureError: a value cannot be serialised.
    """
    if not overrides(model, "compile"):
        return CompileEntries(_with_optimizer(model, compile_config), None)
    if overrides(model, "compile_from_config"):
        return CompileEntries(compile_config, {})
    config = serialization_lib.serialize_dict(compile_arguments(model))
    names = sorted(assigned(type(model), "compile") & set(vars(model)))
    return CompileEntries(_with_optimizer(model, config), {name: _describe(model, name) for name in names})


def overrides(model: Any, method: str) -> bool:
    """Return whether the user's class replaces a method of ``keras.Model``."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _with_optimizer(model: Any, config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(config or {}), "optimizer": serialization_lib.serialize_keras_object(model.optimizer)}


def _describe(model: Any, name: str) -> Any:
    value = getattr(model, name)
    if value is model.optimizer:
        return _OPTIMIZER
    try:
        return serialization_lib.serialize_keras_object(value)
    except CaptureError as error:
        raise CaptureError(f"{type(model).__name__}.compile() sets self.{name}: {error}") from error


def compile_model(model: Any, manifest: Manifest, *, safe_mode: bool) -> None:
    """Compile a model that was rebuilt from its configuration, with the arguments of the user's model."""
    config = serialization_lib.deserialize_keras_object(manifest.compile_config, safe_mode=safe_mode)
    if overrides(model, "compile") and overrides(model, "compile_from_config"):
        model.compile_from_config(manifest.compile_config)
        return
    # The optimizer in the configuration is already wrapped where necessary.
    keras.Model.compile(model, **config, auto_scale_loss=False)
    for name, value in manifest.compile_attributes.items():
        restored = (
            model.optimizer
            if value == _OPTIMIZER
            else serialization_lib.deserialize_keras_object(value, safe_mode=safe_mode)
        )
        setattr(model, name, restored)
