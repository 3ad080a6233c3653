"""Plain values of objects: numbers, booleans, texts, None, and pytrees of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain_attributes(obj: Any) -> dict[str, Any]:
    """Return the public attributes of an object that are numbers, booleans, texts, None, or pytrees of these."""
    return {name: unwrap(value) for name, value in vars(obj).items() if not name.startswith("_") and is_plain(value)}


def unwrap(value: Any) -> Any:
    """Return a plain value in dicts, lists and tuples, without the wrappers with which TensorFlow tracks these."""
    if isinstance(value, Mapping):
        return {key: unwrap(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(unwrap, value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    return value


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, boolean, text, None, or a pytree of these."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)
