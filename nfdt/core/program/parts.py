"""Disassembly of layers and models that Keras cannot serialise, and their reassembly without their constructor.

Keras does not keep the constructor's arguments of a subclassed model, nor of a layer whose arguments are not plain
values. The attributes that the constructor assigned are sent instead, and ``__init__`` is not run again.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from nfdt.core.keras_internals import Functional, KerasSaveable, serialization_lib

# Attributes that Keras itself sets on a model besides those of a new, compiled one.
_SET_BY_FIT = {"history", "stop_evaluating", "stop_predicting"}


def is_keras_own(obj: Any) -> bool:
    """Return whether a class or function belongs to Keras (or to Python itself)."""
    return str(getattr(obj, "__module__", None)).partition(".")[0] in ("keras", "builtins")


class ByParts:
    """Replacement of a class during Keras' deserialisation.

    Args:
        cls: A subclass of ``keras.Model`` or ``keras.layers.Layer``.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.__name__ = cls.__name__

    def from_config(self, config: dict[str, Any]) -> Any:
        """Return an instance with the attributes that :func:`take_apart` found."""
        parts = serialization_lib.deserialize_keras_object(config)
        make: Any = self.cls.__new__
        instance = make(self.cls)
        options = {"name": parts["name"], "dtype": parts["dtype"]}
        if issubclass(self.cls, Functional):
            Functional.__init__(instance, parts["graph"].input, parts["graph"].output, name=parts["name"])
        elif issubclass(self.cls, keras.Sequential):
            keras.Sequential.__init__(instance, parts["graph"], name=parts["name"])
        elif issubclass(self.cls, keras.Model):
            keras.Model.__init__(instance, **options)
        else:
            keras.Layer.__init__(instance, **options)
        for name, value in parts["attributes"].items():
            setattr(instance, name, value)
        for name, layer in parts["graph_layers"].items():
            setattr(instance, name, instance.get_layer(layer))
        return instance


def needs_parts(obj: Any) -> bool:
    """Return whether a model's class takes constructor arguments, which Keras does not keep."""
    return isinstance(obj, keras.Model) and can_be_taken_apart(obj) and _takes_arguments(type(obj))


def can_be_taken_apart(obj: Any) -> bool:
    """Return whether an object's class derives directly from one of four Keras bases, without its own get_config()."""
    if not isinstance(obj, keras.Layer) or is_keras_own(type(obj)):
        return False
    if not is_keras_own(_owner(type(obj), "get_config")):
        return False
    return next(base for base in type(obj).__mro__ if is_keras_own(base)) in (
        keras.Layer,
        keras.Model,
        keras.Sequential,
        Functional,
    )


def _owner(cls: type, method: str) -> type:
    return next(base for base in cls.__mro__ if method in vars(base))


def _takes_arguments(cls: type) -> bool:
    code = getattr(vars(_owner(cls, "__init__"))["__init__"], "__code__", None)
    if code is None:
        return False
    named = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return bool(set(named) - {"name", "dtype", "trainable"}) or bool(code.co_flags & 0x04)  # 0x04: has *args


def _graph(obj: Any) -> Any:
    """Return the argument of a functional or sequential model for the constructor of its base."""
    if isinstance(obj, Functional):
        return Functional(obj.input, obj.output, name=obj.name)
    if isinstance(obj, keras.Sequential):
        return keras.Model.layers.fget(obj)  # Sequential's own property leaves the input layer out
    return None


def take_apart(obj: Any, refer: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the configuration for :meth:`ByParts.from_config`.

    Args:
        obj: A layer or model for which :func:`can_be_taken_apart` holds.
        refer: Returns the form in which an object that is not Keras' is sent by value.
    """
    serialize = serialization_lib.serialize_keras_object
    values = {name: vars(obj)[name] for name in _attribute_names(obj)}
    in_graph = {id(layer) for layer in obj.layers} if isinstance(obj, Functional | keras.Sequential) else set()
    graph_layers = {name: value.name for name, value in values.items() if id(value) in in_graph}
    return {
        "name": obj.name,
        "dtype": serialize(obj.dtype_policy),
        "graph": serialize(_graph(obj)),
        "graph_layers": graph_layers,
        "attributes": {
            name: serialize(value) if _is_modelled(value) else refer(value)
            for name, value in values.items()
            if name not in graph_layers
        },
    }


def _is_modelled(value: Any) -> bool:
    """Return whether Keras serialises a value: plain values and containers of Keras objects; others are pickled."""
    if value is None or isinstance(value, str | int | float | bool):
        return True
    return any(isinstance(leaf, KerasSaveable) or hasattr(leaf, "get_config") for leaf in keras.tree.flatten(value))


def _attribute_names(obj: Any) -> list[str]:
    cls = type(obj)
    blank = keras.Model(name="blank")
    blank.compile(optimizer=None)
    internal = {*vars(blank), *vars(keras.Layer(name="blank")), *_SET_BY_FIT}
    constructed = assigned(cls, "__init__") - {"name", "built", "optimizer", "loss", "trainable"}
    later = assigned(cls, "build") | assigned(cls, "compile")
    return [
        name
        for name in vars(obj)
        if name in constructed or (name not in internal and name not in later and not name.startswith("_"))
    ]


def assigned(cls: type, method: str) -> set[str]:
    """Return the attributes of ``self`` that the user's versions of a method, and methods that it calls, assign."""
    return set(_assigned(cls, method, set()))


def _assigned(cls: type, method: str, seen: set[str]) -> Iterator[str]:
    seen.add(method)
    for base in cls.__mro__:
        function = vars(base).get(method)
        if not isinstance(function, types.FunctionType) or is_keras_own(base):
            continue
        for instruction in dis.get_instructions(function):
            name = str(instruction.argval)
            if instruction.opname == "STORE_ATTR":
                yield name
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name not in seen:
                yield from _assigned(cls, name, seen)
