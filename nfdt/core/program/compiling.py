"""Arguments of ``compile``, also where the user's model overrides it.

A model that overrides ``compile`` has usually called ``super().compile(...)`` with a part of the arguments and put the
rest on itself. Keras compiles no such model on loading; here the part is compiled and the rest put back.
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
    """The manifest's ``compile`` and ``compile_attributes``.

    Args:
        model: A compiled model.
        compile_config: What Keras serialised of it.

    Raises:
        CaptureError: a value that cannot be shipped.
    """
    if not overrides(model, "compile"):
        return CompileEntries(_with_optimizer(model, compile_config), None)
    if overrides(model, "compile_from_config"):
        return CompileEntries(compile_config, {})
    config = serialization_lib.serialize_dict(compile_arguments(model))
    names = sorted(assigned(type(model), "compile") & set(vars(model)))
    return CompileEntries(_with_optimizer(model, config), {name: _describe(model, name) for name in names})


def overrides(model: Any, method: str) -> bool:
    """Whether the user's class replaces a method of ``keras.Model``."""
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
    """Compile a model that came out of its configuration, as the user's was."""
    config = serialization_lib.deserialize_keras_object(manifest.compile_config, safe_mode=safe_mode)
    if overrides(model, "compile") and overrides(model, "compile_from_config"):
        model.compile_from_config(manifest.compile_config)
        return
    # The optimizer in the configuration is wrapped already where it has to be.
    keras.Model.compile(model, **config, auto_scale_loss=False)
    for name, value in manifest.compile_attributes.items():
        restored = (
            model.optimizer
            if value == _OPTIMIZER
            else serialization_lib.deserialize_keras_object(value, safe_mode=safe_mode)
        )
        setattr(model, name, restored)
