"""Allow-list for programs without code, checked before Keras reads their configuration.

Keras' ``safe_mode`` is no security boundary. Every class and function that a configuration names must therefore be
NFDT's layer, or a public one of Keras of a kind used in training that does not run code, load files or wrap other
frameworks. Where an optimizer, a schedule, an initializer, a regularizer or a constraint is expected, it must be one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import keras

from nfdt.core.errors import PolicyRefused
from nfdt.model.backends.embedding import Embedding
from nfdt.model.program.manifest import Manifest

MAX_DEPTH = 200
MAX_NODES = 2_000_000
MAX_TEXT = 1_000_000

PUBLIC = (
    *("keras", "keras.layers", "keras.models", "keras.losses", "keras.metrics", "keras.optimizers", "keras.random"),
    *("keras.optimizers.schedules", "keras.initializers", "keras.regularizers", "keras.constraints"),
    *("keras.dtype_policies",),
)
FUNCTION_MODULES = ("activations", "losses", "metrics", "initializers", "regularizers", "constraints")
# Layers that run Python code, load files or wrap other frameworks' modules.
DENIED = frozenset({"Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"})
_NOT_FUNCTIONS = frozenset({"deserialize", "get", "serialize"})  # of FUNCTION_MODULES: they make objects
SPECIAL = frozenset({"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__slice__", "__ellipsis__"})

Kinds = tuple[type, ...]

_ROLES: dict[str, Kinds] = {
    "optimizer": (keras.Optimizer,),
    "learning_rate": (keras.optimizers.schedules.LearningRateSchedule,),
    "initializer": (keras.Initializer,),
    "regularizer": (keras.Regularizer,),
    "constraint": (keras.constraints.Constraint,),
}
"""Kinds of objects by the end of the key under which they stand."""

_PARTS: Kinds = (keras.DTypePolicy, keras.random.SeedGenerator, *(kind for kinds in _ROLES.values() for kind in kinds))
_WHOLES: Kinds = (keras.Layer, keras.Loss, keras.Metric)


def check_policy(manifest: Manifest) -> None:
    """Refuse a config job that names anything outside of the allow-list.

    Raises:
        PolicyRefused: the program names such an object; the message contains it and its place.
    """
    for key, entry in manifest.code_entries().items():
        if entry:
            raise PolicyRefused(f"A program without code may not have {key!r}.")
    budget = [MAX_NODES]
    for section, entry in manifest.configurations().items():
        _walk(entry, section, 0, budget, _kinds_of(section, (*_PARTS, *_WHOLES)))


def _walk(node: Any, where: str, depth: int, budget: list[int], kinds: Kinds) -> None:
    budget[0] -= 1
    if depth > MAX_DEPTH or budget[0] < 0:
        raise PolicyRefused(f"{where}: expected at most {MAX_DEPTH} levels and {MAX_NODES} entries. Received: more.")
    if isinstance(node, str) and len(node) > MAX_TEXT:
        raise PolicyRefused(f"{where}: expected texts of at most {MAX_TEXT} characters. Received: {len(node)}.")
    if isinstance(node, Mapping):
        if "class_name" in node:
            _check_object(node, where, kinds)
            if not set(_WHOLES).issubset(kinds):
                kinds = _PARTS
        for key, value in node.items():
            if key == "vocabulary" and isinstance(value, str):
                raise PolicyRefused(
                    f"{where}: a vocabulary may be a list, not a file on the worker. Received: {value!r}."
                )
            _walk(value, f"{where}.{key}", depth + 1, budget, _kinds_of(key, kinds))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _walk(value, f"{where}[{index}]", depth + 1, budget, kinds)


def _kinds_of(key: Any, otherwise: Kinds) -> Kinds:
    """Return the kinds of objects that may stand under a key, as ``kernel_constraint``."""
    return next((kinds for role, kinds in _ROLES.items() if str(key).removesuffix("s").endswith(role)), otherwise)


def _check_object(config: Mapping[str, Any], where: str, kinds: Kinds) -> None:
    name, module = config["class_name"], config.get("module")
    if isinstance(name, str) and name in SPECIAL:
        return
    if name == "function":
        if _is_function(config.get("config")) and module == "builtins":
            return
        name = config.get("config")
    elif config.get("registered_name") in (None, name) and _is_class(module, name, kinds):
        return
    elif (module, name) == (Embedding.__module__, Embedding.__name__) and keras.Layer in kinds:
        return
    raise PolicyRefused(
        f"{where}: {module}.{name} is not on the list of what a job without code may use. Submit it to a server that "
        "runs with --allow-code, or use a layer, loss or metric of Keras."
    )


def _is_function(name: Any) -> bool:
    places = (getattr(keras, module) for module in FUNCTION_MODULES)
    if not isinstance(name, str) or not name.isidentifier() or name in _NOT_FUNCTIONS:
        return False
    return any(callable(getattr(place, name, None)) for place in places)


def _is_class(module: Any, name: Any, kinds: Kinds) -> bool:
    if not isinstance(module, str) or not isinstance(name, str) or not name.isidentifier() or name in DENIED:
        return False
    if module == "keras.src.models.functional" and name == "Functional":
        return keras.Layer in kinds
    is_operation = module.startswith("keras.src.ops.") and all(part.isidentifier() for part in module.split("."))
    if module not in PUBLIC and not is_operation:
        return False
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    if is_operation and keras.Layer not in kinds:
        return False
    return isinstance(found, type) and issubclass(found, keras.Operation if is_operation else kinds)
