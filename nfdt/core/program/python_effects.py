"""Changes that a ``train_step`` makes to Python objects of the script: attributes of the model, variables around it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

MOST = 10_000  # items of a container, and bytes of an array, that are compared; of others their number is
_DEPTH = 3
_PLAIN = (int, float, complex, str, bytes, type(None))


@contextmanager
def python_effects(model: Any) -> Iterator[list[str]]:
    """Find and undo what a run of ``train_step`` in the block changes.

    Attributes that are set, lists, dictionaries, sets and arrays that are changed, and variables that are bound anew
    are found; changes inside of other objects are not. Not set back are a variable that is bound anew, and what a
    container within another one held.

    Args:
        model: A model with a ``train_step`` of the script.

    Yields:
        A list, filled at the end of the block with the names of what has changed.
    """
    own = set(vars(keras.Model()))
    attributes, outside = dict(vars(model)), _names_around(model)
    watched = {f"self.{name}": value for name, value in attributes.items() if name not in own} | outside
    before = {name: _state(value) for name, value in watched.items()}
    contents = {name: _contents(value) for name, value in watched.items()}
    found: list[str] = []
    try:
        yield found
    finally:
        after = {f"self.{name}": value for name, value in vars(model).items() if name not in own}
        after |= _names_around(model)
        found += sorted(name for name, value in after.items() if before.get(name, _MISSING) != _state(value))
        for name in found:
            _restore(watched.get(name), contents.get(name))
        for name in [each.removeprefix("self.") for each in found if each.startswith("self.")]:
            if name in attributes:
                vars(model)[name] = attributes[name]
            else:
                del vars(model)[name]


_MISSING = object()


def _names_around(model: Any) -> dict[str, Any]:
    """Return the variables of the script that its ``train_step`` methods use, by name."""
    found: dict[str, Any] = {}
    for each in type(model).__mro__:
        step = inspect.unwrap(vars(each)["train_step"]) if "train_step" in vars(each) else None
        if inspect.isfunction(step) and not step.__module__.startswith("keras."):
            names = inspect.getclosurevars(step)
            found |= {**names.globals, **names.nonlocals}
    return {name: value for name, value in found.items() if isinstance(value, _PLAIN) or _contents(value) is not None}


def _state(value: Any, depth: int = _DEPTH) -> Any:
    """Return something that is equal for an object as long as the object is not changed."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray):
        return (id(value), value.tobytes() if value.nbytes <= MOST else value.shape)
    if not isinstance(value, list | tuple | dict | set) or not depth:
        return id(value)
    if len(value) > MOST:
        return (id(value), len(value))
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return (0 if isinstance(value, tuple) else id(value), tuple(_state(item, depth - 1) for item in items))


def _contents(value: Any) -> Any:
    """Return a copy of what a container holds; None: it is no container."""
    if isinstance(value, list | dict | set):
        return value.copy()
    return value.copy() if isinstance(value, np.ndarray) and value.nbytes <= MOST else None


def _restore(value: Any, contents: Any) -> None:
    """Give a container what it held; the methods are those of Python's own classes, as Keras' would track the items."""
    if contents is None:
        return
    if isinstance(value, np.ndarray):
        value[...] = contents
    elif isinstance(value, list):
        list.clear(value)
        list.extend(value, contents)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, contents)
    else:
        set.clear(value)
        set.update(value, contents)
