"""Collects the custom classes and functions that configurations name while Keras serialises them.

Inside :func:`collecting`, Keras' serialisation assigns every object that is not Keras' own a unique registered name
and records the object. The worker resolves the names in a ``keras.saving.custom_object_scope``.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from nfdt.core.errors import CaptureError
from nfdt.model.backends.embedding import Embedding
from nfdt.model.keras_internals.models import LAMBDA_METHOD, KerasSaveable, object_registration, serialization_lib
from nfdt.model.keras_internals.training import TORCH_OPTIMIZERS

_REMEDY = (
    "Give it a get_config() that returns all arguments of its constructor, or take only numbers, strings, lists "
    "and dictionaries of them in the constructor."
)


def is_keras_own(obj: Any) -> bool:
    """Return whether a class or function belongs to Keras, to Python itself, or is NFDT's layer."""
    return obj is Embedding or str(getattr(obj, "__module__", None)).partition(".")[0] in ("keras", "builtins")


class CustomObjects:
    """The objects of one program that are not part of Keras, by the name under which they are sent."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def add(self, obj: Any) -> str:
        """Record ``obj`` and return its name, which is the user's own if registered with Keras."""
        if id(obj) not in self._names:
            name = self._choose(obj)
            self._names[id(obj)] = name
            self.by_name[name] = obj
        return self._names[id(obj)]

    def _choose(self, obj: Any) -> str:
        plain = getattr(obj, "__name__", type(obj).__name__)
        if isinstance(obj, type | types.FunctionType):
            registered = object_registration.GLOBAL_CUSTOM_NAMES.get(obj)
            if registered is not None and registered not in self.by_name:
                return str(registered)
        base = "job>" + re.sub(r"\W+", "", plain)
        name, count = base, 1
        while name in self.by_name:
            count += 1
            name = f"{base}_{count}"
        return name


@contextmanager
def collecting(found: CustomObjects) -> Iterator[None]:
    """Add all objects that are not Keras' own to ``found`` when Keras serialises them in the block.

    Raises:
        CaptureError: (in the block) an object cannot be serialised; the message names it.
    """
    name_of = object_registration.get_registered_name
    serialize = serialization_lib.serialize_keras_object
    with ExitStack() as undo:
        undo.enter_context(_replaced(name_of, lambda obj: name_of(obj) if is_keras_own(obj) else found.add(obj)))
        undo.enter_context(_replaced(serialize, _with_fallbacks(serialize, found)))
        marshal = getattr(keras.layers.Lambda, LAMBDA_METHOD)
        undo.callback(setattr, keras.layers.Lambda, LAMBDA_METHOD, marshal)
        setattr(keras.layers.Lambda, LAMBDA_METHOD, lambda _, fn: serialization_lib.serialize_keras_object(fn))
        undo.enter_context(serialization_lib.ObjectSharingScope())
        yield


@contextmanager
def _replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in every loaded module that holds it under its own name."""
    name = original.__name__
    holders = [
        m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType) and vars(m).get(name) is original
    ]
    for module in holders:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, name, original)


def _with_fallbacks(serialize: Callable[[Any], Any], found: CustomObjects) -> Callable[[Any], Any]:
    """Return Keras' ``serialize_keras_object`` with fallbacks for objects that it cannot serialise."""

    def serialize_any(obj: Any) -> Any:
        if _is_opaque(obj):
            return _reference(found, obj)
        try:
            config = serialize(obj)
        except CaptureError:
            raise
        except Exception as error:
            if not isinstance(obj, KerasSaveable):
                return _reference(found, obj)
            raise CaptureError(
                f"{type(obj).__qualname__} cannot be sent to the workers: Keras cannot serialise it. {_REMEDY} "
                f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
            ) from error
        return _portable(_completed(obj, config)) if isinstance(config, dict) else config

    return serialize_any


def _is_opaque(obj: Any) -> bool:
    """Return whether an object is pickled because Keras would marshal it or store a name that cannot be resolved."""
    if isinstance(obj, types.FunctionType):
        return obj.__name__ == "<lambda>" or "<locals>" in obj.__qualname__ or not is_keras_own(obj)
    if isinstance(obj, type):
        return True
    return callable(obj) and not hasattr(obj, "get_config")


def _reference(found: CustomObjects, obj: Any) -> dict[str, Any]:
    """Return the form in which Keras stores a function: deserialisation looks its name up in the scope."""
    return {"module": "builtins", "class_name": "function", "config": found.add(obj), "registered_name": "function"}


def _completed(obj: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Add constructor arguments that an inherited get_config() does not return, from attributes of the same name.

    Raises:
        CaptureError: there is no such attribute for an argument without a default.
    """
    cls, inner = type(obj), config.get("config")
    if is_keras_own(cls) or not isinstance(inner, dict) or not hasattr(obj, "get_config") or "layers" in inner:
        return config
    if not is_keras_own(_owner(cls, "get_config")) or not is_keras_own(_owner(cls, "from_config")):
        return config
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return config
    for parameter in parameters:
        if parameter.kind == parameter.VAR_KEYWORD or parameter.name in inner:
            continue
        if hasattr(obj, parameter.name):
            inner[parameter.name] = serialization_lib.serialize_keras_object(getattr(obj, parameter.name))
        elif parameter.default is parameter.empty:
            raise CaptureError(
                f"{cls.__qualname__} cannot be sent to the workers: its get_config() does not return the constructor "
                f"argument {parameter.name!r}. {_REMEDY}"
            )
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        accepted = {p.name for p in parameters}
        config["config"] = {key: value for key, value in inner.items() if key in accepted}
    return config


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """Name the public class instead of the one that Keras makes on PyTorch of its own optimizers."""
    if str(config.get("module")).startswith(TORCH_OPTIMIZERS):
        config.update(module="keras.optimizers", registered_name=None)
    return config


def _owner(cls: type, method: str) -> Any:
    return next((base for base in cls.__mro__ if method in vars(base)), object)
